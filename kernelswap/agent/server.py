"""Waits for a started server and judges it: ready, smoke. Nothing here changes the host."""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import causes, processes, signatures, units
from kernelswap.agent.client import Client, Unanswered
from kernelswap.protocol import Answer, Cause, Plan


class Failed(Exception):
    """A step failed; carries the cause."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.what)
        self.cause = cause


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
    schedulers = [pid for pid in mine if table[pid].argv and table[pid].argv[0].startswith("sglang::scheduler")]
    if len(schedulers) < plan.schedulers:
        return f"{plan.schedulers} scheduler(s), {len(schedulers)} there"
    if not server.ready():
        return "/ready"
    try:
        answer = server.generate(_unique("ready"), 1, timeout=max(1.0, min(60.0, patience)))
    except Unanswered as error:
        return f"a token ({error})"
    return "" if _tokens(answer) else "a token (the answer was empty)"


def smoke(plan: Plan, server: Client) -> str:
    """Ask the server and judge its answers; returns what was seen. Raises Failed with all faults."""
    until = time.monotonic() + plan.timeouts.smoke
    checks: List[Tuple[str, Callable[[float], List[str]]]] = [
        ("logprobs", lambda left: _check_logprobs(server, left)),
        ("completion", lambda left: _check_completion(server, left)),
        ("chat", lambda left: _check_chat(server, left)),
    ]
    for answer in plan.verify.answers:
        checks.append((f"answer to {answer.prompt!r}", partial(_check_answer, server, answer)))
    faults: List[str] = []
    for name, check in checks:
        left = until - time.monotonic()
        if left <= 0:
            faults.append(f"not done within {plan.timeouts.smoke:g} s")
            break
        try:
            found = check(left)
        except Unanswered as error:
            found = [str(error)]
        faults += [f"{name}: {fault}" for fault in found]
    if faults:
        todo = "the backend answers wrongly: choose another, or correct verify.answers if the model has changed"
        raise Failed(Cause("; ".join(faults), f"journalctl -u {plan.unit}", todo, "smoke", blame="release"))
    return f"{len(checks)} checks, {len(plan.verify.answers)} known answer(s) right"


def _check_logprobs(server: Client, left: float) -> List[str]:
    answer = server.generate(_unique("logprobs"), 8, left)
    values = [row[0] if isinstance(row, list) and row else None for row in _tokens(answer)]
    if not values:
        return ["no tokens came back"]
    bad = [value for value in values if not isinstance(value, (int, float)) or not math.isfinite(value)]
    return [f"{len(bad)} of {len(values)} are not finite"] if bad else []


def _check_completion(server: Client, left: float) -> List[str]:
    return [] if server.complete(_unique("completion"), 8, left) else ["the text is empty"]


def _check_chat(server: Client, left: float) -> List[str]:
    """The same greedy question twice: an answer, and the same one.

    Both times out of the prefix cache, so that both run the same kernels on the same shapes: a sound GPU server may
    differ between a cold and a warm prompt.
    """
    prompt = _unique("chat")
    server.chat(prompt, 16, left)
    first, second = server.chat(prompt, 16, left).text, server.chat(prompt, 16, left).text
    if not first:
        return ["the answer is empty"]
    return [] if first == second else [f"asked twice, answered {first[:80]!r} and {second[:80]!r}"]


def _check_answer(server: Client, answer: Answer, left: float) -> List[str]:
    reply = server.chat(answer.prompt, answer.max_tokens, left)
    if re.search(answer.expect, reply.text):
        return []
    cut = f" (cut at max-tokens {answer.max_tokens}: raise it if the model was still thinking)" if reply.cut else ""
    return [f"expected /{answer.expect}/, got {reply.text[:200]!r}{cut}"]


def _tokens(answer: Dict[str, Any]) -> List[Any]:
    meta = answer.get("meta_info")
    rows = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    return rows if isinstance(rows, list) else []


def _unique(what: str) -> str:
    """A prompt that no cache has seen."""
    return f"{what} check {secrets.token_hex(8)}: the capital of France is"
