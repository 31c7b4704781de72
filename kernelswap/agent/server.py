"""Waits for a started server, and measures it. Nothing here changes the host."""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence

from kernelswap.agent import causes, client, engine, processes, signatures, units
from kernelswap.agent.client import Client, Unanswered
from kernelswap.protocol import Cause, Plan, Throughput


class Failed(Exception):
    """A step failed; carries the cause, and what was measured."""

    def __init__(self, cause: Cause, numbers: Optional[Dict[str, float]] = None) -> None:
        super().__init__(cause.what)
        self.cause = cause
        self.numbers = numbers or {}


# Ends of a unit, in systemd's words, for which the host is to blame and not the release.
HOST_RESULTS = ("oom-kill", "timeout", "resources", "start-limit-hit")


def unit_failure(plan: Plan, status: units.UnitStatus, what: str) -> Failed:
    """A failure of the unit, with the first real error of its log as the cause."""
    where = _log_of(plan, status)
    cause = causes.find(units.log(status.invocation), signatures.load(), where)
    blame = "host" if status.result in HOST_RESULTS else "release"
    return Failed(cause or Cause(what, where, "read the log; it holds no error that is known", blame=blame))


def _log_of(plan: Plan, status: units.UnitStatus) -> str:
    return f"journalctl -u {plan.unit} _SYSTEMD_INVOCATION_ID={status.invocation}"


def wait_ready(plan: Plan, server: Client, started: float, tell: Callable[[str], None]) -> str:
    """Wait until the unit's own server answers one token; returns what was seen. Raises Failed.

    started: when the start was asked for, in seconds since the boot, which no change of the clock moves. The deadline
    moves on while the log advances; an error after which no server comes up ends the wait once the log has stood still
    since.
    """
    begin = time.monotonic()
    deadline = begin + plan.timeouts.ready
    told = begin
    watch: Optional[causes.Watch] = None
    while True:
        try:
            status = units.status(plan.unit)
        except units.UnitError:
            time.sleep(1)  # systemd is busy with itself, as when it is updated
            status = units.status(plan.unit)
        # Where only the guard has ended so far, as at a slow boot, systemd tries again.
        if not status.running or (status.sub == "auto-restart" and status.main_ran):
            raise unit_failure(plan, status, f"the server ended while starting ({status.active}, {status.result})")
        waiting_for = _not_ready(plan, server, started, patience=deadline - time.monotonic())
        if not waiting_for:
            return f"{plan.schedulers} scheduler(s), port {plan.port}, one token generated"
        now = time.monotonic()
        if now - told >= 15:
            lines = units.log(status.invocation)
            watch = watch or causes.Watch(signatures.load(), _log_of(plan, status))
            if watch.advanced(lines):
                deadline = now + plan.timeouts.ready
            if watch.doom:
                raise Failed(watch.doom)
            tell(f"{now - begin:.0f} s: waiting for {waiting_for}; log: {_last_message(lines)[:160]}")
            told = now
        if now >= deadline:
            raise unit_failure(plan, status, f"not ready within {plan.timeouts.ready:g} s: waiting for {waiting_for}")
        time.sleep(0.25)


def _last_message(lines: Sequence[str]) -> str:
    """The last line that a logger wrote, rather than the rest of a warning that Python printed."""
    return next(
        (line.strip() for line in reversed(lines) if line.startswith("[")), lines[-1].strip() if lines else "empty"
    )


def _not_ready(plan: Plan, server: Client, started: float, patience: float) -> str:
    """What a starting server still lacks; "" if nothing. patience: seconds to wait for its token."""
    listening = processes.listeners(plan.port)
    table = processes.table()  # later than the listeners, so that it holds their owners
    mine = processes.cgroup_pids(table, plan.unit)
    strangers = [pid for pid in listening if pid in table and pid not in mine]
    if strangers:
        owner = processes.describe(table[strangers[0]])
        where = f"ss -ltnp sport = {plan.port}"
        raise Failed(Cause(f"port {plan.port} is held by {owner}", where, "stop that process", "port-in-use"))
    if not listening:
        return f"a listener on port {plan.port}"
    ticks = os.sysconf("SC_CLK_TCK")
    if any(pid and table[pid].started < int(started * ticks) for pid in listening if pid in table):
        return "the listener of this start"
    schedulers = processes.schedulers(table, plan.unit)
    if schedulers < plan.schedulers:
        return f"{plan.schedulers} scheduler(s), {schedulers} there"
    if not server.ready():
        return "/ready"
    try:
        answer = server.generate(f"ready? {secrets.token_hex(8)}", 1, timeout=max(1.0, min(60.0, patience)))
    except Unanswered as error:
        return f"a token ({error})"
    return "" if answer.tokens else "a token (the answer was empty)"


def throughput(plan: Plan, wanted: Throughput, api_key: str, evidence: Path) -> Dict[str, float]:
    """Run SGLang's own serving benchmark on the host; returns its figures. Raises Failed below the floor.

    Lengths are fixed, the seed is fresh, the first request is a warm-up that does not count. A run in which a request
    failed says nothing and fails.
    """
    where = f"{evidence}/bench.jsonl"
    try:
        with engine.scratch(plan) as folder:
            output = Path(folder) / "out.jsonl"
            extra = {"TMPDIR": folder, **({"OPENAI_API_KEY": api_key} if api_key else {})}
            words = bench_words(plan, wanted, output)
            done = engine.run(plan, words, plan.timeouts.throughput, extra=extra, folder=folder)
            line = _last_line(output)
    except subprocess.TimeoutExpired:
        todo = "raise timeouts.throughput, or lower verify.throughput.requests"
        raise Failed(
            Cause(f"no result within {plan.timeouts.throughput:g} s", where, todo, "throughput", "release")
        ) from None
    result = parse_bench(line) if line else None
    if result is None:
        last = next((text for text in reversed(done.stderr.splitlines()) if text.strip()), f"exit {done.returncode}")
        last = last.replace(api_key, "[redacted]") if api_key else last
        raise Failed(
            Cause(f"the benchmark gave no result: {last[:200]}", where, "run it by hand", "throughput", "release")
        )
    # What SGLang adds of the server's own settings holds its API keys: only numbers are kept.
    with (evidence / "bench.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    return judge(result, wanted, where)


def bench_words(plan: Plan, wanted: Throughput, output: Path) -> List[str]:
    options = {
        "--backend": "sglang",
        "--host": client.probe_address(plan),
        "--port": plan.port,
        "--model": plan.model_path,
        "--served-model-name": plan.served_name,
        "--dataset-name": "random-ids",
        "--random-input-len": wanted.input_tokens,
        "--random-output-len": wanted.output_tokens,
        "--random-range-ratio": "1.0",
        "--num-prompts": wanted.requests,
        "--max-concurrency": wanted.concurrency,
        "--seed": secrets.randbelow(2**31),
        "--output-file": output,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return ["-W", "ignore", "-c", engine.BENCH, *words, "--disable-tqdm"]


def parse_bench(line: str) -> Optional[Dict[str, float]]:
    """The numbers of one result line of the benchmark; None if it is none."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or "output_throughput" not in values:
        return None
    return {key: value for key, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}


def judge(result: Dict[str, float], wanted: Throughput, where: str) -> Dict[str, float]:
    """The figures for the report. Raises Failed if requests failed or the rate is below the floor."""
    completed = int(result.get("completed", 0))
    rate = result["output_throughput"]
    numbers = {
        "output_tok_s": round(rate, 2),
        "completed": float(completed),
        "failed": float(wanted.requests - completed),
        "concurrency": float(wanted.concurrency),
        "output_tokens": result.get("total_output_tokens", math.nan),
        "median_ttft_ms": round(result.get("median_ttft_ms", math.nan), 2),
        "median_itl_ms": round(result.get("median_itl_ms", math.nan), 3),
    }
    numbers = {key: value for key, value in numbers.items() if math.isfinite(value)}
    if completed < wanted.requests:
        what = f"{wanted.requests - completed} of {wanted.requests} benchmark requests failed"
        raise Failed(Cause(what, where, "read the server's log", "throughput", "release"))
    if wanted.floor is not None and rate < wanted.floor:
        what = f"{rate:.1f} output tok/s at {wanted.concurrency} concurrent requests, the floor is {wanted.floor:g}"
        raise Failed(
            Cause(what, where, "try another backend, or lower verify.throughput.floor", "throughput", "release")
        )
    return numbers


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""
