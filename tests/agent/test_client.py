from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kernelswap.agent.client import Client, Unanswered, base_url, joined
from kernelswap.protocol import Plan

METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 3.0
sglang:num_running_reqs_offline_batch{model_name="tiny"} 7.0
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 2.0
"""


ANSWERS = {
    "/busy/metrics": (200, METRICS.encode()),
    "/bare/metrics": (200, b"python_gc_objects_collected_total 1\n"),
    "/ok": (200, b'{"a": 1}'),
    "/text": (200, b"garbage"),
    "/list": (200, b"[]"),
    "/busy": (503, b"busy"),
    "/elsewhere": (302, b""),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"data: x\n")
                    time.sleep(0.02)
            return
        if self.path == "/cut":
            self.send_response(500)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"half")
            return
        status, body = ANSWERS.get(self.path, (404, b""))
        if self.headers.get("Authorization") == "Bearer wrong":
            status = 401
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/ok")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def base() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_answers_and_failures(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client = Client(base, "tiny")
    assert client.post("/ok", {}, 5) == {"a": 1}
    assert client.status("/busy") == 503
    for path, text in (("/text", "no JSON"), ("/list", "no JSON object"), ("/busy", "HTTP 503"), ("/none", "HTTP 404")):
        with pytest.raises(Unanswered, match=text):
            client.post(path, {}, 5)
    with pytest.raises(Unanswered, match="HTTP 302"):
        client.post("/elsewhere", {}, 5)


@pytest.mark.parametrize(("server", "count"), [("/busy", 5), ("/bare", None), ("/none", None)])
def test_running_requests(server: str, count: int | None, base: str) -> None:
    assert Client(base + server, "tiny").running_requests() == count


def test_the_key_goes_only_where_one_is_needed(base: str) -> None:
    """A GET asks for health of whoever listens, which may be a stranger."""
    client = Client(base, "tiny", "wrong")
    assert client.status("/ok") == 200
    with pytest.raises(Unanswered, match="HTTP 401"):
        client.post("/ok", {}, 5)


def test_an_answer_without_an_end_ends_by_its_deadline(base: str) -> None:
    begin = time.monotonic()
    with pytest.raises(Unanswered, match="POST /endless: timed out"):
        Client(base, "tiny").post("/endless", {}, 0.2)
    assert time.monotonic() - begin < 5


def test_an_answer_that_is_cut_is_none(base: str) -> None:
    with pytest.raises(Unanswered, match="IncompleteRead"):
        Client(base, "tiny").post("/cut", {}, 5)


def test_nobody_listens(unused_port: int) -> None:
    client = Client(f"http://127.0.0.1:{unused_port}", "tiny")
    assert client.status("/ready") == 0
    assert not client.ready()
    with pytest.raises(Unanswered, match="refused"):
        client.get("/metrics")


def test_the_key_is_not_shown() -> None:
    assert "s3cret" not in repr(Client("http://127.0.0.1:1", "tiny", "s3cret"))


@pytest.mark.parametrize(
    ("address", "url"),
    [("0.0.0.0", "http://127.0.0.1:30000"), ("::", "http://[::1]:30000"), ("10.0.0.7", "http://10.0.0.7:30000")],
)
def test_base_url(address: str, url: str) -> None:
    plan = Plan(
        instance="main", release="r", profile="p", model="m", python="/p", argv=(), environment={}, user="u",
        model_path="/m", served_name="m", address=address, port=30000,
    )  # fmt: skip
    assert base_url(plan) == url


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}"


DONE = "data: [DONE]"


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([event(text=" 東"), "", event(text="京"), DONE], " 東京"),
        ([event(delta={"role": "assistant", "content": ""}), event(delta={"content": "4"}), DONE], "4"),
        ([event(delta={"reasoning_content": "Hm"}), event(delta={"content": "4"}), DONE], "4"),
        ([event(delta={"reasoning_content": "Hm"}), DONE], "Hm"),
        ([": a comment", event(text="a"), 'data: {"choices": [], "usage": {}}', DONE], "a"),
        ([DONE], ""),
    ],
)
def test_a_stream(lines: list[str], text: str) -> None:
    assert joined(lines, "/v1/completions").text == text


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([event(text="a")], "the stream ended early"),
        ([], "the stream ended early"),
        (["data: {", DONE], "no JSON in the stream"),
        (['data: {"error": {"message": "abort"}}', DONE], "an error in the stream"),
    ],
)
def test_a_broken_stream(lines: list[str], words: str) -> None:
    with pytest.raises(Unanswered, match=words):
        joined(lines, "/v1/completions")
