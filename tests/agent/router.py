"""An sglang-router in memory, over real HTTP: what 0.3.2 was measured to answer about its workers.

A worker that is put in is listed a moment later, and one that is taken out is gone at once. tests/lab/test_rolling.py
has the real one.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeRouter(ThreadingHTTPServer):
    """workers: URL -> id. healthy: whether it takes them for healthy; deaf: it lists none that is put in; stuck: it
    keeps those that are taken out. watch: called with each change, before it is made."""

    daemon_threads = True

    def __init__(self, *workers: str, key: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.workers = {url: str(uuid.uuid4()) for url in workers}
        self.key, self.healthy, self.deaf, self.stuck, self.nonsense = key, True, False, False, ""
        self.entries: list[dict[str, Any]] = []
        self.watch: Callable[[str, str], None] = lambda _what, _url: None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeRouter

    def do_GET(self) -> None:
        router = self.server
        if router.nonsense:
            self.send(200, router.nonsense)
        elif self.path != "/workers":
            self.send(404, "")
        elif self.allowed():
            rows = [{"id": name, "url": url, "is_healthy": router.healthy} for url, name in router.workers.items()]
            self.send(200, json.dumps({"workers": rows, "total": len(rows)}))

    def do_POST(self) -> None:
        router = self.server
        entry = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.allowed():
            router.watch("in", entry["url"])
            router.entries.append(entry)
            if not router.deaf:
                router.workers.setdefault(entry["url"], str(uuid.uuid4()))
            self.send(202, json.dumps({"status": "accepted"}))

    def do_DELETE(self) -> None:
        router, name = self.server, self.path.rpartition("/")[2]
        url = next((url for url, known in router.workers.items() if known == name), None)
        if not self.allowed():
            return
        if url is None:
            self.send(404, json.dumps({"code": "WORKER_NOT_FOUND"}))
            return
        router.watch("out", url)
        if not router.stuck:
            del router.workers[url]
        self.send(202, json.dumps({"status": "accepted"}))

    def allowed(self) -> bool:
        right = not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        if not right:
            self.send(401, "")
        return right

    def send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_words: Any) -> None:
        pass
