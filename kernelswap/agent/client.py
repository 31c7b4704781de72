"""SGLang's HTTP interface, as far as the agent asks it. Source: SGLang 0.5.23, entrypoints/http_server.py."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import secrets
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from kernelswap.protocol import Plan

CHUNK = 65536  # bytes
TOLD = 5  # tokens of each place, with their logprobs

# Of SGLang 0.5.23's gauges (srt/observability/metrics_collector.py). Several schedulers report apart: sums of requests
# and tokens, the fullest cache, the mean of rates.
GAUGES: Dict[str, Tuple[str, Callable[[Sequence[float]], float]]] = {
    "running": ("num_running_reqs", sum),
    "queued": ("num_queue_reqs", sum),
    "token_usage": ("token_usage", max),
    "cache_hit_rate": ("cache_hit_rate", lambda values: sum(values) / len(values)),
    "gen_throughput": ("gen_throughput", sum),
    "spec_accept_length": ("spec_accept_length", lambda values: sum(values) / len(values)),
}


class Unanswered(Exception):
    """The server refused, failed or timed out; the text says which."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """SGLang never sends one elsewhere; a key must not follow it."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Reply:
    """An answer of the chat; where a model only thought, its thoughts. cut: it ended at max_tokens; tokens: how many
    the server counted, None where it does not say."""

    text: str
    cut: bool
    tokens: Optional[int] = None


@dataclass(frozen=True)
class Token:
    """One generated token. logprob: in nats, None if it is no finite number; text: as it decodes alone, a part of a
    character then as U+FFFD; top: the most probable tokens at its place, (logprob, id) each."""

    logprob: Optional[float]
    id: int
    text: Optional[str] = None
    top: Tuple[Tuple[float, int], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One token of an answer of the chat or a completion, as its text. top: the most probable ones at its place,
    (logprob, text) each."""

    text: str
    top: Tuple[Tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Generated:
    """An answer of the native endpoint. count: the tokens that the server says it made; prompt: those that it read;
    seconds: of the request."""

    text: str
    tokens: Tuple[Token, ...]
    count: Optional[int]
    seconds: float
    prompt: int = 0


@dataclass(frozen=True)
class Client:
    """Speaks to one server. api_key is kept out of repr."""

    base: str
    model: str
    api_key: str = ""

    def __repr__(self) -> str:
        return f"Client({self.base})"

    def status(self, path: str, timeout: float = 10) -> int:
        """The HTTP status of a GET; 0 if nobody listens."""
        try:
            return self._open(path, None, timeout)[0]
        except Unanswered:
            return 0

    def get(self, path: str, timeout: float = 10) -> str:
        return self._answer(path, None, timeout)

    def post(self, path: str, body: Dict[str, Any], timeout: float) -> Dict[str, Any]:
        text = self._answer(path, body, timeout)
        try:
            answer = json.loads(text)
        except ValueError:
            raise Unanswered(f"POST {path}: no JSON: {text[:200]!r}") from None
        if not isinstance(answer, dict):
            raise Unanswered(f"POST {path}: no JSON object: {text[:200]!r}")
        return answer

    def ready(self) -> bool:
        """Whether the server says that it is up: `/ready`, or `/health` where an older SGLang has none."""
        status = self.status("/ready")
        return status == 200 or (status == 404 and self.status("/health", timeout=30) == 200)

    def generate(
        self, prompt: str, max_tokens: int, timeout: float, top: int = 0, sampling: Optional[Dict[str, Any]] = None
    ) -> Generated:
        """Greedy tokens, not ended by the model's own end, with the logprob of each.

        top: with so many of the most probable tokens at each place. sampling: more or other sampling parameters.
        """
        parameters = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True, **(sampling or {})}
        body = {"text": prompt, "sampling_params": parameters, "return_logprob": True}
        if top:
            parameters["skip_special_tokens"] = False  # so that the text is the tokens' text
            body.update({"top_logprobs_num": top, "return_text_in_logprobs": True})
        start = time.monotonic()
        answer = self.post("/generate", body, timeout)
        return generated(answer, time.monotonic() - start)

    def score(self, prompt: str, max_tokens: int, top: int, prompt_too: bool, timeout: float) -> Dict[str, Any]:
        """Greedy tokens with their logprobs and those of the `top` most probable at each place; prompt_too: of the
        prompt's own as well. Never out of the prefix cache."""
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": top,
            "logprob_start_len": 0 if prompt_too else -1,
            "extra_key": secrets.token_hex(8),  # a part of the cache to itself
        }
        return self.post("/generate", body, timeout)

    def complete(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        """Greedy, not ended by the model's own end."""
        return self._reply("/v1/completions", self._completion(prompt, max_tokens), timeout)

    def stream_completion(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        return self._stream("/v1/completions", self._completion(prompt, max_tokens), timeout)

    def chat(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        return self._reply("/v1/chat/completions", self._chat(prompt, max_tokens), timeout)

    def stream_chat(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        return self._stream("/v1/chat/completions", self._chat(prompt, max_tokens), timeout)

    def completion_choices(self, prompt: str, max_tokens: int, timeout: float) -> List[Choice]:
        """The tokens of a completion; none where the server does not tell them."""
        body = {**self._completion(prompt, max_tokens), "logprobs": TOLD}
        told = _logprobs(self.post("/v1/completions", body, timeout))
        tops = [top if isinstance(top, dict) else {} for top in _list(told.get("top_logprobs"))]
        return [
            Choice(str(text), tuple((value, name) for name, value in top.items() if _finite(value) is not None))
            for text, top in zip(_list(told.get("tokens")), tops)
        ]

    def chat_choices(self, prompt: str, max_tokens: int, timeout: float) -> List[Choice]:
        """The same of the chat."""
        body = {**self._chat(prompt, max_tokens), "logprobs": True, "top_logprobs": TOLD}
        rows = _list(_logprobs(self.post("/v1/chat/completions", body, timeout)).get("content"))
        return [
            Choice(
                str(row.get("token")),
                tuple(
                    (float(top["logprob"]), str(top.get("token")))
                    for top in _list(row.get("top_logprobs"))
                    if isinstance(top, dict) and _finite(top.get("logprob")) is not None
                ),
            )
            for row in rows
            if isinstance(row, dict)
        ]

    def _completion(self, prompt: str, max_tokens: int) -> Dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}

    def _chat(self, prompt: str, max_tokens: int) -> Dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}

    def _reply(self, path: str, body: Dict[str, Any], timeout: float) -> Reply:
        answer = self.post(path, body, timeout)
        choices, usage = _list(answer.get("choices")), answer.get("usage")
        if not choices or not isinstance(choices[0], dict):
            raise Unanswered(f"POST {path}: no choices in the answer")
        message = choices[0].get("message") or {}
        text = choices[0].get("text") or message.get("content") or message.get("reasoning_content") or ""
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Reply(str(text), choices[0].get("finish_reason") == "length", count if isinstance(count, int) else None)

    def _stream(self, path: str, body: Dict[str, Any], timeout: float) -> Reply:
        return joined(self._answer(path, {**body, "stream": True}, timeout).splitlines(), path)

    def gauges(self, timeout: float = 10) -> Dict[str, float]:
        """The server's counters by our names. Raises Unanswered without `--enable-metrics`."""
        return gauges(self.get("/metrics", timeout))

    def running_requests(self) -> Optional[int]:
        """Requests that run or wait, by the server's own count: `/v1/loads`, whose figures are those of the moment, or
        where an older SGLang has none its gauges; None where there are none either."""
        with contextlib.suppress(Unanswered, ValueError, TypeError, KeyError):
            status, text = self._open("/v1/loads?include=core", None, 10, keyed=True)
            if status == 200:
                loads = json.loads(text)["loads"]
                return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        with contextlib.suppress(Unanswered):
            seen = self.gauges()
            waiting = [seen[name] for name in ("running", "queued") if name in seen]
            return int(sum(waiting)) if waiting else None
        return None

    def server_info(self, timeout: float = 10) -> Dict[str, Any]:
        """The server's arguments as it resolved them, and its state. It holds the server's keys in clear."""
        for path in ("/server_info", "/get_server_info"):  # the older name, before 2026
            status, text = self._open(path, None, timeout, keyed=True)
            if status == 200:
                with contextlib.suppress(ValueError):
                    answer = json.loads(text)
                    if isinstance(answer, dict):
                        return answer
        raise Unanswered(f"GET {path}: HTTP {status}")

    def flush(self, timeout: float) -> bool:
        """Empty the prefix cache, as soon as the server is idle; whether it did."""
        try:
            return self._open(f"/flush_cache?timeout={timeout:g}", {}, timeout + 10)[0] == 200
        except Unanswered:
            return False

    def _answer(self, path: str, body: Optional[Dict[str, Any]], timeout: float) -> str:
        status, text = self._open(path, body, timeout)
        if status != 200:
            raise Unanswered(f"{'GET' if body is None else 'POST'} {path}: HTTP {status}: {text[:200]!r}")
        return text

    def _open(self, path: str, body: Optional[Dict[str, Any]], timeout: float, keyed: bool = False) -> Tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        # Who listens may be somebody else: what needs no key (/health, /ready, /metrics) is asked without.
        if self.api_key and (keyed or body is not None):
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            return send(self.base + path, timeout, body, headers)
        except Unanswered as error:
            raise Unanswered(f"{'GET' if body is None else 'POST'} {path}: {error}") from None


def send(
    url: str,
    timeout: float,
    body: Optional[Dict[str, Any]] = None,
    headers: Optional[Dict[str, str]] = None,
    method: str = "",
) -> Tuple[int, str]:
    """Status and text of an answer; POST where there is a body. Raises Unanswered, which does not name the URL."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers or {}, method=method or None)
    # No proxy: the environment's would send a loopback request elsewhere.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    try:
        with _answer_of(opener, request, timeout) as answer:
            return answer.code, _whole(answer, timeout)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unanswered(str(reason or type(error).__name__)) from None


def _answer_of(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout: float) -> Any:
    """Whatever its status."""
    try:
        return opener.open(request, timeout=timeout)
    except urllib.error.HTTPError as answer:
        return answer


def _whole(answer: Any, timeout: float) -> str:
    """The body, which a broken server may send for ever, or not to its end. Raises OSError or HTTPException."""
    until, parts = time.monotonic() + timeout, []
    while part := answer.read1(CHUNK):
        parts.append(part)
        if time.monotonic() > until:
            raise TimeoutError("timed out: the answer does not end")
    if answer.length:
        raise http.client.IncompleteRead(parts[-1] if parts else b"", answer.length)
    return b"".join(parts).decode("utf-8", "replace")


def generated(answer: Dict[str, Any], seconds: float) -> Generated:
    """What /generate said; what it lacks is missing there too."""
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    rows, tops = _list(meta.get("output_token_logprobs")), _list(meta.get("output_top_logprobs"))
    tokens = tuple(_token(row, top) for row, top in zip_longest(rows, tops[: len(rows)]))
    count, prompt = meta.get("completion_tokens"), meta.get("prompt_tokens")
    return Generated(
        str(answer.get("text") or ""),
        tokens,
        count if isinstance(count, int) else None,
        seconds,
        prompt if isinstance(prompt, int) else 0,
    )


def _token(row: Any, top: Any) -> Token:
    logprob, number, text = (*_list(row), None, None, None)[:3]
    best = [(_finite(item[0]), item[1]) for item in _list(top) if isinstance(item, list) and len(item) > 1]
    return Token(
        _finite(logprob),
        number if isinstance(number, int) else -1,
        text if isinstance(text, str) else None,
        tuple((value, int(name)) for value, name in best if value is not None),
    )


def _logprobs(answer: Dict[str, Any]) -> Dict[str, Any]:
    choices = _list(answer.get("choices"))
    found = choices[0].get("logprobs") if choices and isinstance(choices[0], dict) else None
    return found if isinstance(found, dict) else {}


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []


def _finite(value: Any) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def joined(lines: Iterable[str], path: str) -> Reply:
    """The answer in a stream of server-sent events. Raises Unanswered for one that ended early or told an error."""
    text, thought, done, cut = "", "", False, False
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            raise Unanswered(f"POST {path}: no JSON in the stream: {data[:200]!r}") from None
        if not isinstance(event, dict) or "error" in event:
            raise Unanswered(f"POST {path}: an error in the stream: {data[:200]!r}")
        for choice in _list(event.get("choices")):
            delta = choice.get("delta") or {}
            text += str(choice.get("text") or delta.get("content") or "")
            thought += str(delta.get("reasoning_content") or "")
            cut = cut or choice.get("finish_reason") == "length"
    if not done:
        raise Unanswered(f"POST {path}: the stream ended early")
    return Reply(text or thought, cut)


_GAUGE = re.compile(r"^sglang:(\w+)(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)


def gauges(text: str) -> Dict[str, float]:
    """The server's counters by our names, out of its Prometheus text; what it does not report is left out."""
    seen: Dict[str, List[float]] = {}
    for name, value in _GAUGE.findall(text):
        with contextlib.suppress(ValueError):
            seen.setdefault(name, []).append(float(value))
    found = {ours: combine(seen[theirs]) for ours, (theirs, combine) in GAUGES.items() if theirs in seen}
    if not found.get("spec_accept_length"):  # 0 is what SGLang says of a server that does not speculate
        found.pop("spec_accept_length", None)
    return found


def listens(plan: Plan) -> bool:
    """Whether anybody takes connections at a server's address."""
    try:
        socket.create_connection((probe_address(plan), plan.port), timeout=0.2).close()
    except OSError:
        return False
    return True


def probe_address(plan: Plan) -> str:
    """The address at which the host itself reaches the server."""
    return from_here(plan.address)


def from_here(address: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104


def base_url(plan: Plan) -> str:
    return url(probe_address(plan), plan.port)


def url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
