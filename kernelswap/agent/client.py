"""SGLang's HTTP interface, as far as the agent asks it. Source: SGLang 0.5.23, entrypoints/http_server.py."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from kernelswap.protocol import Plan


class Unanswered(Exception):
    """The server refused, failed or timed out; the text says which."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """SGLang never sends one elsewhere; a key must not follow it."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass(frozen=True)
class Reply:
    """An answer of the chat; where a model only thought, its thoughts. cut: it ended at max_tokens."""

    text: str
    cut: bool


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

    def generate(self, prompt: str, max_tokens: int, timeout: float) -> Dict[str, Any]:
        """Greedy tokens with the logprob of each, by the native endpoint."""
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, "return_logprob": True}
        return self.post("/generate", body, timeout)

    def complete(self, prompt: str, max_tokens: int, timeout: float) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", body, timeout)
        return str(_first_choice(answer, "/v1/completions").get("text") or "")

    def chat(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        answer = self.post("/v1/chat/completions", body, timeout)
        choice = _first_choice(answer, "/v1/chat/completions")
        message = choice.get("message") or {}
        text = message.get("content") or message.get("reasoning_content") or ""
        return Reply(str(text), cut=choice.get("finish_reason") == "length")

    def running_requests(self) -> Optional[int]:
        """Requests that run or wait, by the server's own counters; None without `--enable-metrics`."""
        try:
            return count_requests(self.get("/metrics"))
        except Unanswered:
            return None

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

    def _open(self, path: str, body: Optional[Dict[str, Any]], timeout: float) -> Tuple[int, str]:
        headers = {"Content-Type": "application/json"}
        # Who listens may be somebody else: what needs no key (/health, /ready, /metrics) is asked without.
        if self.api_key and body is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers)
        # No proxy: the environment's would send a loopback request elsewhere.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        try:
            with opener.open(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Unanswered(f"{'GET' if body is None else 'POST'} {path}: {reason or type(error).__name__}") from None


def _first_choice(answer: Dict[str, Any], path: str) -> Dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unanswered(f"POST {path}: no choices in the answer")
    return choices[0]


_COUNTER = re.compile(r"^sglang:num_(?:running|queue)_reqs(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


def count_requests(metrics: str) -> Optional[int]:
    """The sum of running and queued requests in SGLang's Prometheus text; None if it does not report them."""
    values = [float(value) for value in _COUNTER.findall(metrics)]
    return int(sum(values)) if values else None


def probe_address(plan: Plan) -> str:
    """The address at which the host itself reaches the server."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(plan.address, plan.address)  # noqa: S104


def base_url(plan: Plan) -> str:
    return url(probe_address(plan), plan.port)


def url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
