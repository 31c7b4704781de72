"""Users of a fleet: requests without a pause, streamed and whole; each tells whether it was answered in full."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LIMIT = 60.0  # seconds for one request


@dataclass(frozen=True)
class Asked:
    """One request. fault: what its answer lacks; "" if nothing."""

    kind: str
    begin: float
    end: float
    fault: str


@dataclass
class Load:
    """So many users at once, each asking for so many tokens over and over. pause: seconds to read an answer."""

    address: str
    port: int
    model: str
    users: int = 6
    tokens: int = 300
    pause: float = 0
    asked: list[Asked] = field(default_factory=list)
    ends: bool = False

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._use, args=(number,), daemon=True) for number in range(self.users)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self.ends = True
            for thread in threads:
                thread.join(LIMIT)

    @property
    def failed(self) -> list[Asked]:
        return [each for each in self.asked if each.fault]

    def _use(self, user: int) -> None:
        kinds = [self._whole, self._stream_native, self._stream_openai]
        for number in itertools.count(user):
            if self.ends:
                return
            ask = kinds[number % len(kinds)]
            begin = time.time()
            try:
                fault = ask(f"user {user}, question {number}: {begin}")
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                fault = f"{type(error).__name__}: {error}"
            self.asked.append(Asked(ask.__name__, begin, time.time(), fault))
            time.sleep(self.pause)

    def _whole(self, prompt: str) -> str:
        answer = json.loads(self._post("/v1/completions", {**self._body, "prompt": prompt}))
        return self._short(answer["usage"]["completion_tokens"])

    def _stream_native(self, prompt: str) -> str:
        sampling = {"max_new_tokens": self.tokens, "ignore_eos": True}
        events = self._stream("/generate", {"text": prompt, "sampling_params": sampling})
        return self._short(events[-1]["meta_info"]["completion_tokens"])

    def _stream_openai(self, prompt: str) -> str:
        events = self._stream("/v1/completions", {**self._body, "prompt": prompt})
        choices = [choice for event in events for choice in event["choices"]]
        if not any(choice.get("text") for choice in choices):
            return "no text"
        return "" if choices[-1].get("finish_reason") == "length" else "no end"

    @property
    def _body(self) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}

    def _short(self, count: int) -> str:
        return "" if count == self.tokens else f"{count} tokens instead of {self.tokens}"

    def _stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        lines = self._post(path, {**body, "stream": True}).decode().splitlines()
        data = [line.partition(":")[2].strip() for line in lines if line.startswith("data:")]
        if not data or data[-1] != "[DONE]":
            raise ValueError(f"a stream that was cut after {len(data)} events")
        return [json.loads(each) for each in data[:-1]]

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=LIMIT)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {text[:200]!r}")
        return text
