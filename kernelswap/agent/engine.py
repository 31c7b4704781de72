"""The SGLang that is installed on the host, asked as the unit's own user and in its environment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from typing import Dict, Iterator, List, Optional, Sequence

from kernelswap.agent import host
from kernelswap.protocol import Plan

# SGLang decides what a command line means. argparse ends by SystemExit with its message on stderr.
PARSE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
prepare_server_args(json.load(sys.stdin))
"""


def run(
    plan: Plan,
    words: Sequence[str],
    timeout: float,
    stdin: str = "",
    extra: Optional[Dict[str, str]] = None,
    folder: str = "/",
) -> subprocess.CompletedProcess[str]:
    """Run the engine's interpreter as the unit's user. Raises OSError or subprocess.TimeoutExpired."""
    uid, gid = host.user_ids(plan.user)
    return subprocess.run(
        [plan.python, *words],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**plan.environment, **(extra or {})},
        user=uid,
        group=gid,
        extra_groups=os.getgrouplist(plan.user, gid),
    )


def version(plan: Plan) -> str:
    """Of the SGLang that is installed, without importing it; "" where it does not say."""
    ask = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    try:
        done = run(plan, ["-c", ask], timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def scratch(plan: Plan) -> Iterator[str]:
    """A folder of the unit's user, gone afterwards."""
    folder = tempfile.mkdtemp(prefix="kernelswap-")
    try:
        shutil.chown(folder, *host.user_ids(plan.user))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parser_says(plan: Plan, timeout: float) -> str:
    """What SGLang's own parser has against the command line; "" if it takes it."""
    words = list(plan.argv[plan.argv.index("-m") + 2 :]) if "-m" in plan.argv else list(plan.argv)
    try:
        with scratch(plan) as folder:
            # The unit's own cache folder is there from its first start on only.
            extra = {"HOME": folder, "SGLANG_CACHE_DIR": folder}
            done = run(plan, ["-W", "ignore", "-c", PARSE], timeout, json.dumps(words), extra, folder)
    except subprocess.TimeoutExpired:
        return f"SGLang's parser did not answer within {timeout:g} s"
    except OSError as error:
        return f"{plan.python}: {error.strerror}"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"SGLang's parser ended with {done.returncode}"


def readable_faults(plan: Plan) -> List[str]:
    """What the unit's user cannot execute or read of what it needs: the interpreter and the model's files."""
    script = """
import os, sys
path = sys.argv[1]
if not os.path.isdir(path):
    print(path + ": no such folder, or not reachable"); sys.exit()
if not os.path.isfile(os.path.join(path, "config.json")):
    print(os.path.join(path, "config.json") + ": no such file")
for name in sorted(os.listdir(path)):
    name = os.path.join(path, name)
    if not os.access(name, os.R_OK):
        print(name + ": not readable" if os.path.exists(name) else name + ": a link to nothing")
"""
    try:
        # -S: the interpreter alone; importing the engine is another check.
        done = run(plan, ["-S", "-c", script, plan.model_path], timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"user {plan.user} cannot execute {plan.python}: {getattr(error, 'strerror', error)}"]
    if done.returncode:
        return [f"user {plan.user} cannot execute {plan.python}: {done.stderr.strip()[-200:]}"]
    return [f"user {plan.user}: {line}" for line in done.stdout.splitlines()]
