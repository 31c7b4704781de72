"""SGLang's own serving benchmark: one process for many runs, since importing it takes longer than a run.

Each run is the benchmark's own command line, executed anew in the same interpreter; so whatever options it has are its
own, in every version. It runs as the unit's user and in the unit's environment.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence, Tuple

from kernelswap.agent import client, engine, processes
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.redaction import redact
from kernelswap.measured import Run
from kernelswap.protocol import Plan, Throughput

# The serving benchmark has moved (2026-07); the old name still works and warns. Options that it may not have yet are
# left out then. A line on stdin is a run, and a line on stdout says why it gave no result, or has it. So root opens no
# file in a folder of the unit's user.
SERVE = """
import importlib.util, json, os, runpy, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    run = json.loads(line)
    error, own, result = "", False, ""
    try:
        moved = importlib.util.find_spec("sglang.benchmark") and importlib.util.find_spec("sglang.benchmark.serving")
        name = "sglang.benchmark.serving" if moved else "sglang.bench_serving"
        if not importlib.util.find_spec(name):
            raise ModuleNotFoundError(f"No module named {name!r}")
        with open(importlib.util.find_spec(name).origin, encoding="utf-8") as file:
            text = file.read()
        sys.argv = [name, *run["words"], *(word for words in run["optional"] if words[0] in text for word in words)]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        error = "" if not end.code else str(end.code)
    except BaseException as fault:
        error, own = f"{type(fault).__name__}: {fault}", isinstance(fault, ImportError)
    try:
        with open("out.jsonl", encoding="utf-8") as file:
            result = file.read().strip().rpartition("\\n")[2]
        os.remove("out.jsonl")
    except (OSError, ValueError):
        pass
    print(json.dumps([error, own, result]), file=answers, flush=True)
"""

TICK = 0.5  # seconds between two looks at the client
BUSY = 0.9  # share of a core from which on the benchmark's one thread keeps the server waiting
STARVED = 0.8  # share of the concurrency below which the server has less to do than was asked for


class NoResult(Exception):
    """The benchmark gave none; the text says why. late: its time was over. own: by no fault of the server's, as where
    it cannot be imported."""

    def __init__(self, why: str, late: bool = False, own: bool = False) -> None:
        super().__init__(why)
        self.late, self.own = late, own


@dataclass(frozen=True)
class Tick:
    """A moment of the client's work. share: of one core. running, queued: requests, by the server; None if unknown."""

    seconds: float
    share: float
    running: Optional[float] = None
    queued: Optional[float] = None


@dataclass(frozen=True)
class Measured:
    """One run. values: the benchmark's numbers; started, ended: epoch seconds."""

    values: Dict[str, float]
    ticks: Tuple[Tick, ...]
    started: float
    ended: float


@dataclass
class Benchmark:
    """The benchmark's process. plan: of the release whose interpreter and environment it uses; served: of the server.

    A run that takes longer than `deadline`, of the monotonic clock, raises NoResult.
    """

    plan: Plan
    served: Plan
    api_key: str
    deadline: float
    log: IO[bytes]
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: IO[bytes]
    server: Client = field(init=False)

    def __post_init__(self) -> None:
        self.server = Client(client.base_url(self.served), self.served.served_name, self.api_key)

    def run(self, wanted: Throughput, concurrency: int, requests: int, seed: int) -> Measured:
        """Raises NoResult."""
        words = self._words(wanted, concurrency, requests, seed)
        optional = [["--tokenize-prompt"], ["--cache-report"], ["--warmup-requests", "0"]]
        started = time.time()
        try:
            self._send(json.dumps({"words": words, "optional": optional}))
            ticks, error, own, result = self._wait()
        except BrokenPipeError:
            ticks, (error, own, result) = (), self._end()
        values = parse(result)
        if error or values is None:
            raise NoResult(redact(self._last_words(error), [self.api_key]), own=own)
        ended = time.time()
        return Measured(values, ticks, max(started, ended - values.get("duration", math.inf)), ended)

    def _words(self, wanted: Throughput, concurrency: int, requests: int, seed: int) -> List[str]:
        options = {
            "--backend": "sglang",
            "--host": client.probe_address(self.served),
            "--port": self.served.port,
            "--model": self.served.model_path,
            "--served-model-name": self.served.served_name,
            "--dataset-name": "random-ids",
            "--random-input-len": wanted.input_tokens,
            "--random-output-len": wanted.output_tokens,
            "--random-range-ratio": "1.0",
            "--num-prompts": requests,
            "--max-concurrency": concurrency,
            "--seed": seed,
            "--output-file": "out.jsonl",
        }
        return [*(str(word) for pair in options.items() for word in pair), "--disable-tqdm"]

    def _send(self, line: str) -> None:
        self.requests.write(line.encode() + b"\n")
        self.requests.flush()

    def _wait(self) -> Tuple[Tuple[Tick, ...], str, bool, str]:
        """What the client did until its answer, and the answer: why there is no result, whether that is its own fault,
        and the result."""
        ticks: List[Tick] = []
        before, since = _cpu_seconds(self.process.pid), time.monotonic()
        while not select.select([self.answers], [], [], TICK)[0]:
            now = time.monotonic()
            if now > self.deadline:
                raise NoResult("its time is over", late=True)
            used = _cpu_seconds(self.process.pid)
            share = (used - before) / (now - since)
            ticks.append(Tick(now - since, share, *(self._requests() if share >= BUSY else ())))
            before, since = used, now
        line = self.answers.readline()
        error, own, result = json.loads(line) if line.endswith(b"\n") else self._end()  # it may die in the middle
        return tuple(ticks), error, own, result

    def _end(self) -> Tuple[str, bool, str]:
        """How it ended, whether that is its own fault, and no result."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self.process.wait(5) < 0:
                return f"it was killed by signal {-self.process.returncode}, as when memory is short", True, ""
        return "it ended", False, ""

    def _requests(self) -> Tuple[Optional[float], Optional[float]]:
        try:
            seen = self.server.gauges(timeout=2)
        except Unanswered:
            return None, None
        return seen.get("running"), seen.get("queued")

    def _last_words(self, error: str) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        told = error if error not in ("", "1") else ""
        return (told if told not in ("", "it ended") or not lines else lines[-1].strip())[:200] or "it said nothing"


@contextlib.contextmanager
def opened(plan: Plan, served: Plan, api_key: str, deadline: float) -> Iterator[Benchmark]:
    """The benchmark of `plan`'s SGLang for the server of `served`; ended afterwards. Raises OSError."""
    words = ["-W", "ignore", "-c", SERVE]
    with engine.scratch(plan) as folder, tempfile.TemporaryFile() as log:
        extra = {"TMPDIR": folder, **({"OPENAI_API_KEY": api_key} if api_key else {})}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        opening, ended = engine.process(plan, words, folder, extra, **streams), contextlib.suppress(BrokenPipeError)
        with opening as process, process.stdout as answers, ended, process.stdin as requests:  # type: ignore[union-attr]
            yield Benchmark(plan, served, api_key, deadline, log, process, requests, answers)


def _cpu_seconds(pid: int) -> float:
    """What the process's first thread, in which the benchmark sends and reads, has had of a core."""
    return processes.cpu_ticks(Path(f"/proc/{pid}/task/{pid}/stat")) / os.sysconf("SC_CLK_TCK")


def parse(line: str) -> Optional[Dict[str, float]]:
    """The numbers of one result line of the benchmark; None if it is none.

    What SGLang adds of the server's own settings holds its API keys: only numbers are kept.
    """
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not _is_number(values.get("output_throughput")):
        return None
    cached = values.pop("cache_report", None)
    if isinstance(cached, dict):
        values["cached_tokens"] = cached.get("total_cached_tokens")
    return {key: value for key, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def run_of(values: Dict[str, float], concurrency: int, requests: int) -> Run:
    def latency(name: str) -> Dict[str, float]:
        places = {place: values.get(f"{place}_{name}_ms") for place in ("median", "p90", "p99")}
        return {place: round(value, 3) for place, value in places.items() if value is not None}

    completed = int(values.get("completed", 0))
    cached = values.get("cached_tokens")
    return Run(
        concurrency=concurrency,
        completed=completed,
        failed=requests - completed,
        duration=round(values.get("duration", 0.0), 3),
        input_tokens=int(values.get("total_input_tokens", 0)),
        output_tokens=int(values.get("total_output_tokens", 0)),
        input_tok_s=round(values.get("input_throughput", 0.0), 2),
        output_tok_s=round(values["output_throughput"], 2),
        ttft=latency("ttft"),
        itl=latency("itl"),
        e2e=latency("e2e_latency"),
        cached_tokens=None if cached is None else int(cached),
    )


def client_bound(ticks: Sequence[Tick], concurrency: int, duration: float) -> Optional[bool]:
    """Whether the benchmark itself was the bottleneck for most of a run: its thread had no rest while the server had
    fewer requests than were to be there, and none waiting. None where that cannot be known."""
    busy = [tick for tick in ticks if tick.share >= BUSY]
    known = [tick for tick in busy if tick.running is not None]
    starved = [
        tick for tick in known if 0 < (tick.running or 0) < STARVED * concurrency and not tick.queued
    ]  # at 0 the run has not begun, or is over
    if _seconds(starved) > duration / 2:
        return True
    return None if _seconds(busy) - _seconds(known) > duration / 2 else False


def _seconds(ticks: Sequence[Tick]) -> float:
    return sum(tick.seconds for tick in ticks)
