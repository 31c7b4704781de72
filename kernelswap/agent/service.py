"""The agent as a service: a swap outlives the connection that asked for it, and its own death."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import Optional

from kernelswap import verdict
from kernelswap.agent import clock, events, files, host, processes, signatures, transaction, units
from kernelswap.agent.events import Events
from kernelswap.agent.host import Folders
from kernelswap.agent.running import running, service_name
from kernelswap.protocol import AGENT_PATH, PYTHON, Report, Request, Running, decode, encode

HEARTBEAT = 30.0  # seconds of silence after which whoever follows is told that the swap still runs


def swap(request: Request) -> int:
    """Start a swap, or join the one with the same goal, and follow it to its end. Returns the exit code."""
    folders = Folders(request.instance)
    try:
        host.read_journal(folders)  # raises where a person must look first
        joined = _start_or_join(folders, request)
    except OSError as error:
        todo = "free the disk, or make it writable"
        print(f"REFUSED, nothing was touched: {error.filename or folders.state}: {error.strerror}: {todo}")
        return 1
    return follow(folders, joined) if joined else 1


def _start_or_join(folders: Folders, request: Request) -> Optional[str]:
    """The id of the swap to follow; None if another one runs, and that was said."""
    files.make_folder(folders.state)
    folders.state.chmod(0o700)
    with files.lock(folders.start_lock, patience=60):
        now = running(folders)
        if not (now and now.active and units.status(service_name(request.instance)).running):
            files.write(folders.request, encode(request), mode=0o600)
            _start(request.instance, request.swap)
            return request.swap
        if not now.request.same_goal(request):
            print(_refusal(now))
            return None
        since = f"by {now.request.who} since {clock.shown(now.since)}"
        print(f"joined swap {now.request.swap} to {now.request.release}, {since}")
        return now.request.swap


def _refusal(now: Running) -> str:
    goal = now.request
    return (
        f"REFUSED, nothing was touched: swap {goal.swap} ({goal.action} to {goal.release}) by {goal.who} runs since "
        f"{clock.shown(now.since)}, step {now.step}; wait for it, or ask for the same goal to follow it"
    )


def _start(instance: str, swap_id: str) -> None:
    settings = ["Restart=on-failure", "RestartSec=1", "StartLimitIntervalSec=600", "StartLimitBurst=5", "UMask=0077"]
    # A polite signal is no success either, and the recover unit tries for ever.
    settings += ["RestartForceExitStatus=SIGTERM SIGINT SIGHUP", f"OnFailure=kernelswap-recover@{instance}.service"]
    command = ["systemd-run", "--quiet", "--collect", f"--unit={service_name(instance)}"]
    command += [f"--property={setting}" for setting in settings]
    command += [PYTHON, AGENT_PATH, "run", instance, swap_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise units.UnitError("systemd-run: no answer within 60 s: run the same command again") from None
    if done.returncode:
        raise units.UnitError(f"systemd-run: {done.stderr.strip()}")


def follow(folders: Folders, swap_id: str) -> int:
    """Print a swap's progress until it ends; 0 if it was committed."""
    start = spoke = checked = time.monotonic()
    step = "starting"
    for event in Events(folders.evidence(swap_id) / "events.jsonl").follow():
        now = time.monotonic()
        if event is None:
            if now - spoke >= HEARTBEAT:
                _say(f"{step:<12}    ...    {now - start:.0f} s since the start of the swap")
                spoke = now
            if now - checked >= 2:
                checked = now
                if not _is_active(folders.instance):
                    return _say_end(folders, swap_id)
            continue
        step = event.step
        line = events.render(event)
        if line:
            _say(line)
            spoke = now
        if event.kind == "result":
            return _exit_code(host.report(folders, swap_id))
    return 1


def _is_active(instance: str) -> bool:
    """Whether the agent's service runs; where systemd is busy with itself, the next question tells."""
    try:
        return units.status(service_name(instance)).running
    except units.UnitError:
        return True


def _say_end(folders: Folders, swap_id: str) -> int:
    """The agent is no more and its last event has not come: it may have died with only that missing."""
    report = host.report(folders, swap_id)
    gone = "the agent is gone without a result; run the same command again to finish the story"
    _say(verdict.text(report) if report else gone)
    return _exit_code(report)


def _exit_code(report: Optional[Report]) -> int:
    return 0 if report and report.outcome in ("committed", "unchanged") else 1


def _say(line: str) -> None:
    print(line)
    sys.stdout.flush()


def run(instance: str, swap_id: str) -> None:
    """What the transient service does: close an open story first, then carry out the request."""
    folders = Folders(instance)
    signatures.load()  # now: our own file may be replaced while we run
    story = Events(folders.evidence(swap_id) / "events.jsonl")
    with files.lock(folders.lock, waiting=lambda pid: story.emit("waiting", "progress", f"for {who_holds(pid)}")):
        _tidy(folders)
        request = decode(Request, files.read(folders.request) or "")
        journal = host.read_journal(folders)
        if journal:
            report = transaction.recover(folders, journal)
            if journal.request.swap == swap_id:
                _say(verdict.text(report))
                return
            story.emit("recover", "note", f"swap {journal.request.swap} had not ended: {verdict.headline(report)}")
        if request.swap == swap_id and not host.report(folders, swap_id):
            _say(verdict.text(transaction.perform(folders, request)))


def recover(instance: str) -> None:
    """What the recover unit does after a reboot."""
    signatures.load()
    folders = Folders(instance)
    with files.lock(folders.lock, waiting=lambda pid: _say(f"waiting for {who_holds(pid)}")):
        _tidy(folders)
        journal = host.read_journal(folders)
        if journal:
            _say(verdict.text(transaction.recover(folders, journal)))


def _tidy(folders: Folders) -> None:
    """Remove what a death in the middle of writing has left; of adopted processes it may hold secrets."""
    state = folders.state
    written = (folders.config, state, *(path for name in ("*", "swaps/*", "measured/*") for path in state.glob(name)))
    for folder in (*written, folders.committed_unit.parent, folders.candidate_unit.parent):
        files.drop_unfinished(folder)
    for path in state.glob("adopted-*.env"):
        with contextlib.suppress(OSError):
            files.remove(path)


STATES = {
    "T": "; it was stopped: `kill -CONT {pid}` lets it go on",
    "D": "; it hangs in the kernel: if it stays so, reboot the host",
}


def who_holds(pid: int) -> str:
    """The process that has a lock, for people: what, whose, since when, and what helps where it cannot go on."""
    process = processes.table().get(pid)
    if process is None:
        return f"process {pid}, which is not to be seen from here"
    return processes.describe(process) + STATES.get(process.state, "").format(pid=pid)
