"""Waits for a started server. Nothing here changes the host."""

from __future__ import annotations

import os
import secrets
import time
from typing import Callable, Dict, Optional, Sequence

from kernelswap.agent import causes, client, processes, signatures, units
from kernelswap.agent.client import Client, Unanswered
from kernelswap.protocol import Cause, Plan


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
    pause = 0.025
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
        # With `expose: ready` users wait for what is lost here.
        if client.listens(plan):
            time.sleep(pause)
            pause = min(0.25, 2 * pause)
        else:
            _wait_for_listener(plan, 0.25)


def _wait_for_listener(plan: Plan, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until and not client.listens(plan):
        time.sleep(0.025)


def _last_message(lines: Sequence[str]) -> str:
    """The last line that a logger wrote, rather than the rest of a warning that Python printed."""
    return next(
        (line.strip() for line in reversed(lines) if line.startswith("[")), lines[-1].strip() if lines else "empty"
    )


def _not_ready(plan: Plan, server: Client, started: float, patience: float) -> str:
    """What a starting server still lacks; "" if nothing. patience: seconds to wait for its token."""
    listening = processes.listeners(plan.port)
    if not listening:
        return f"a listener on port {plan.port}"
    table = processes.table()  # later than the listeners, so that it holds their owners
    mine = processes.cgroup_pids(table, plan.unit)
    strangers = [pid for pid in listening if pid in table and pid not in mine]
    if strangers:
        owner = processes.describe(table[strangers[0]])
        where = f"ss -ltnp sport = {plan.port}"
        raise Failed(Cause(f"port {plan.port} is held by {owner}", where, "stop that process", "port-in-use"))
    ticks = os.sysconf("SC_CLK_TCK")
    if any(pid and table[pid].started < int(started * ticks) for pid in listening if pid in table):
        return "the listener of this start"
    schedulers = processes.schedulers(table, plan.unit)
    if schedulers < plan.schedulers:
        return f"{plan.schedulers} scheduler(s), {schedulers} there"
    # SGLang calls itself ready about a second after it answers; who is let in as soon as may be does not wait for that.
    if plan.expose != "ready" and not server.ready():
        return "/ready"
    try:
        answer = server.generate(f"ready? {secrets.token_hex(8)}", 1, timeout=max(1.0, min(60.0, patience)))
    except Unanswered as error:
        return f"a token ({error})"
    return "" if answer.tokens else "a token (the answer was empty)"
