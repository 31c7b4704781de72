"""A stand-in for SGLang's server that is ready in a third of a second, for tests in which neither the engine nor its
load time is the point: what happens around a server that dies, hangs or answers wrongly, at any moment.

To whoever looks from outside it is what SGLang 0.5.23 was measured to be (its processes and their titles, signals, exit
codes, endpoints, order of start), but it computes nothing. STANDIN_FAULT makes it fail on purpose:

    crash-at-load           a traceback, then killed by its own hand, as when a kernel is missing
    exit-0-at-load          the same with exit code 0: SGLang can crash like that
    slow-load:SECONDS       loads for so long
    hangs-on-start          never opens its port
    crash-after-ready       crashes at the first question to the chat
    crash-during-throughput crashes at the fifth request of a benchmark
    never-generates         says that it is ready, and never answers
    garbage                 answers fluently and wrongly
    nan                     computes logprobs that are no numbers
    slow-answer:SECONDS     needs so long for each token
    slow-benchmark:SECONDS  the same for a benchmark only
    hangs-after:REQUESTS    answers so many, and no more
    hangs-on-stop           ignores every signal but SIGKILL
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any, NoReturn

from sglang.srt.server_args import prepare_server_args

FAULT, _, AMOUNT = os.environ.get("STANDIN_FAULT", "").partition(":")
LOAD_SECONDS = float(AMOUNT) if FAULT == "slow-load" else 0.05
TOKEN_SECONDS = float(AMOUNT) if FAULT == "slow-answer" else 0.001
MOST = float(AMOUNT) if FAULT == "hangs-after" else float("inf")
DRAIN_POLL = 5.0  # SGLang looks this often whether a SIGTERM may be followed
ANSWERS = {
    "What is 2+2?": "2+2 is 4.",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of 日本?": "東京 is the capital of 日本.",
}
WORDS = [" the", " river", " runs", " to", " sea", " and", " city", " on", " a", " bank", " of", " stone", " old"]
# A worker does nothing, and ends when its launcher does, however that ends.
WORKER = "import sys; open('/proc/self/comm', 'w').write(sys.argv[1][:15]); sys.stdin.read()"


class State:
    """What the threads of the server share."""

    def __init__(self) -> None:
        self.up = False
        self.draining = False
        self.running = 0
        self.benchmarked = 0
        self.asked = 0
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.signal = 0


def log(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def crash(status: int = 137) -> NoReturn:
    log("Scheduler hit an exception: Traceback (most recent call last):")
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    print(f'  File "scheduler.py", line 1, in run_scheduler_process\n{error}', file=sys.stderr)
    log("Received sigquit from a child process. It usually means the child failed.")
    if status == 137:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(status)


def speak(prompt: str, count: int) -> list[tuple[float, int]]:
    """Tokens that follow from a prompt, always the same: (logprob, index in WORDS)."""
    dice = random.Random(prompt)  # noqa: S311
    return [(-dice.random(), dice.randrange(len(WORDS))) for _ in range(count)]


def start_workers(count: int) -> list[subprocess.Popen[bytes]]:
    names = ["sglang::scheduler"] if count == 1 else [f"sglang::scheduler_TP{rank}" for rank in range(count)]
    return [
        subprocess.Popen([name, "-S", "-c", WORKER, name], executable=sys.executable, stdin=subprocess.PIPE)
        for name in [*names, "sglang::detokenizer"]
    ]


def watch(workers: list[subprocess.Popen[bytes]], state: State) -> None:
    """SGLang's watchdog: a server whose worker is gone ends itself."""
    while not state.stop.wait(1):
        if any(worker.poll() is not None for worker in workers):
            log("Subprocess crashed, its server ends")
            os.kill(os.getpid(), signal.SIGKILL)


def load() -> None:
    log("Load weight begin. avail mem=94.00 GB")
    while FAULT == "hangs-on-start":
        time.sleep(60)
    time.sleep(LOAD_SECONDS)
    if FAULT in ("crash-at-load", "exit-0-at-load"):
        crash(0 if FAULT == "exit-0-at-load" else 137)
    log("Load weight end. avail mem=4.00 GB")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    request_queue_size = 2048
    args: Any
    state: State

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of ours."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        state, args = self.server.state, self.server.args
        if path in ("/health", "/health_generate", "/ready"):
            self.send(200 if state.up and not state.draining else 503, "")
        elif path == "/metrics" and args.enable_metrics:
            labels = f'{{model_name="{args.served_model_name}"}}'
            self.send(200, f"sglang:num_running_reqs{labels} {state.running}.0\nsglang:num_queue_reqs{labels} 0.0\n")
        elif not self.authorized():
            self.send(401, '{"error": "Unauthorized"}')
        elif path == "/v1/loads":
            self.send(200, json.dumps({"loads": [{"num_running_reqs": state.running, "num_waiting_reqs": 0}]}))
        elif path == "/v1/models":
            self.send(200, json.dumps({"object": "list", "data": [{"id": args.served_model_name, "object": "model"}]}))
        elif path == "/server_info":  # its keys in clear, as SGLang does
            self.send(200, json.dumps(vars(args)))
        else:
            self.send(404, '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        state = self.server.state
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/flush_cache") and self.authorized():  # there is none
            self.send(200, "Cache flushed.")
            return
        answer = {"/generate": self.generate, "/v1/completions": self.complete, "/v1/chat/completions": self.chat}
        if not self.authorized():
            self.send(401, '{"error": "Unauthorized"}')
        elif self.path not in answer or not state.up:
            self.send(503 if self.path in answer else 404, '{"detail": "not here, or not now"}')
        else:
            with state.lock:
                state.running += 1
                state.asked += 1
            try:
                answer[self.path](body)
            finally:
                with state.lock:
                    state.running -= 1

    def generate(self, body: dict[str, Any]) -> None:
        sampling = body.get("sampling_params", {})
        count = int(sampling.get("max_new_tokens", 16))
        if body.get("stream"):  # only the benchmark asks for that
            self.server.state.benchmarked += 1
            if FAULT == "crash-during-throughput" and self.server.state.benchmarked >= 5:
                crash()
            self.begin(200, "text/event-stream")
            for number in range(1, count + 1):
                self.wait_for_tokens(1)
                time.sleep(float(AMOUNT) if FAULT == "slow-benchmark" else 0)
                event = {"text": "x" * number, "meta_info": {"completion_tokens": number}}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            return
        if sampling.get("regex") or sampling.get("json_schema"):
            error = "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported"
            self.send(400, json.dumps({"error": {"message": f"{error} when the server is launched with it off"}}))
            return
        self.wait_for_tokens(count)
        tokens = speak(body.get("text", ""), count)
        rows = [[None if FAULT == "nan" else logprob, number, WORDS[number]] for logprob, number in tokens]
        best = [[[logprob, number, WORDS[number]], [logprob - 3, number - 1, ""]] for logprob, number in tokens]
        meta = {
            "completion_tokens": count,
            "prompt_tokens": len(body.get("text", "").split()),
            "output_token_logprobs": rows,  # NaN has no JSON: SGLang's writer makes it null
            "output_top_logprobs": best if body.get("top_logprobs_num") else [],
        }
        self.send(200, json.dumps({"text": "".join(WORDS[number] for _, number in tokens), "meta_info": meta}))

    def complete(self, body: dict[str, Any]) -> None:
        count = int(body.get("max_tokens", 16))
        self.wait_for_tokens(count)
        text = "".join(WORDS[number] for _, number in speak(body["prompt"], count))
        self.answer(body, {"text": text}, {"text": text}, count)

    def chat(self, body: dict[str, Any]) -> None:
        if FAULT == "crash-after-ready":
            crash()
        self.wait_for_tokens(int(body.get("max_tokens") or 16))
        question = str(body["messages"][-1]["content"])
        text = ANSWERS.get(question, "I do not know.") if FAULT != "garbage" else "The of and the of and."
        self.answer(body, {"message": {"role": "assistant", "content": text}}, {"delta": {"content": text}}, 9)

    def answer(self, body: dict[str, Any], whole: dict[str, Any], part: dict[str, Any], count: int) -> None:
        """As one object, or as a stream if that was asked for."""
        if body.get("stream"):
            self.begin(200, "text/event-stream")
            chunk = {"choices": [{"index": 0, "finish_reason": "length", **part}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
            return
        choice = {"index": 0, "finish_reason": "stop", **whole}
        self.send(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": count}}))

    def wait_for_tokens(self, count: int) -> None:
        time.sleep(count * TOKEN_SECONDS)
        # Until the client gives up, which ends a request.
        while FAULT == "never-generates" or self.server.state.asked > MOST:
            time.sleep(0.1)
            try:
                if not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return
            except BlockingIOError:
                continue

    def authorized(self) -> bool:
        key = self.server.args.api_key
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def send(self, status: int, text: str) -> None:
        self.begin(status, "application/json")
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        log(f'INFO:     {self.client_address[0]} - "{format % args}"')


def on_signal(state: State, number: int) -> None:
    if number == signal.SIGTERM:
        state.draining = True
    if not state.signal:
        state.signal = number
        state.stop.set()


def main() -> int:
    args = prepare_server_args(sys.argv[1:])
    args.served_model_name = args.served_model_name or args.model_path
    log(f"server_args={args}")
    state = State()
    for number in (signal.SIGINT, signal.SIGTERM):
        ignore = FAULT == "hangs-on-stop"
        signal.signal(number, signal.SIG_IGN if ignore else lambda seen, _frame: on_signal(state, seen))
    workers = start_workers(args.tp_size)
    threading.Thread(target=watch, args=(workers, state), daemon=True).start()
    load()
    try:
        server = Server((args.host, args.port), Handler)
    except OSError as error:  # only now, like SGLang
        log(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address: {error.strerror}")
        return 3
    server.args, server.state = args, state
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    time.sleep(0.05)  # its warm-up: connections are accepted and answered by 503
    state.up = True
    log("The server is fired up and ready to roll!")
    state.stop.wait()
    while state.draining and time.sleep(DRAIN_POLL) is None and state.running:
        pass  # new requests are accepted all the while
    server.shutdown()
    server.server_close()  # the listener first, then each open request to its end
    for worker in workers:
        worker.kill()
    if state.signal == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
