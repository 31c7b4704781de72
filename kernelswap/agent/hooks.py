"""Who else is told of a swap's moments: a command of the host, or a webhook. What they answer is kept, without secrets.

A command runs as root, in no shell, with the message as JSON on its standard input; a webhook gets it by POST.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Dict, Optional

from kernelswap.agent import client
from kernelswap.agent.client import Unanswered
from kernelswap.agent.host import Journal
from kernelswap.protocol import Hook

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST = 65536  # bytes of an answer that are kept
HOOKS_FILE = "hooks.txt"


@dataclass(frozen=True)
class Told:
    """How a hook ended. problem: "" if it did its work; output: what it said."""

    problem: str
    output: str


def message(moment: str, journal: Journal, outcome: Optional[str], cause: Optional[str]) -> Dict[str, Optional[str]]:
    """What a hook is told. outcome, cause: of a swap that has ended, without secrets."""
    request = journal.request
    return {
        "hook": moment,
        "host": request.host,
        "instance": request.instance,
        "swap": request.swap,
        "action": request.action,
        "who": request.who,
        "reason": request.reason,
        "from": journal.previous,
        "to": request.release,
        "back": str(journal.back).lower(),
        "outcome": outcome,
        "cause": cause,
    }


def tell(hook: Hook, message: Dict[str, Optional[str]]) -> Told:
    """Run the hook to its end, or to its time limit."""
    try:
        return _post(hook, message) if hook.webhook else _run(hook, json.dumps(message))
    except (OSError, ValueError) as error:  # no such command; a disk that is full
        return Told(f"cannot be run: {error}", "")


def _run(hook: Hook, text: str) -> Told:
    # A file, and not a pipe: what the command leaves running may hold that open for ever.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            hook.command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root"},
            cwd="/",
            start_new_session=True,
        )
        try:
            process.communicate(text.encode(), hook.timeout)
            code = process.returncode
            problem = (
                "" if code == 0 else f"ended with exit code {code}" if code > 0 else f"was ended by signal {-code}"
            )
        except subprocess.TimeoutExpired:
            problem = f"did not end within {hook.timeout:g} s"
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return Told(problem, output.read(MOST).decode("utf-8", "replace"))


def _post(hook: Hook, message: Dict[str, Optional[str]]) -> Told:
    try:
        status, text = client.send(hook.webhook, hook.timeout, dict(message), {"Content-Type": "application/json"})
    except Unanswered as error:
        return Told(f"does not answer: {error}", "")
    return Told("" if 200 <= status < 300 else f"answered HTTP {status}", text[:MOST])


def describe(moment: str, hook: Hook) -> str:
    """For people; a webhook's URL may hold a token."""
    return f"the {moment} hook" + (f" {hook.command[0]}" if hook.command else "")
