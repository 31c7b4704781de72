"""Whether the model is there: all that SGLang will read of it, whole and readable by the unit's user."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from kernelswap.agent import engine
from kernelswap.protocol import HostFault, Plan, decode

# Read at once, since the agent's file may be replaced while it runs.
PROBE = (pkgutil.get_data("kernelswap", "agent/model_probe.py") or b"").decode()
SHOWN = 10

# Where a page fault costs a round trip through a network or a daemon. SGLang maps its weights, so each is one (SGLang
# PR 37806: 28 MiB/s from Lustre; 29268: a time-out on a cold NFS; both cured by reading ahead).
SLOW = re.compile(r"nfs|lustre|ceph|cifs|smb|9p|gpfs|beegfs|gluster|afs|ocfs2|orangefs|pvfs|virtiofs|fuse")


@dataclass(frozen=True)
class ModelFiles:
    """What the probe saw. faults and notes: (what, what to do). real: the model's folder without links. weights,
    largest: bytes of all its weights and of the largest file. headers: whether the interpreter has Python.h. unusable:
    why there is no answer."""

    faults: Tuple[Tuple[str, ...], ...] = ()
    notes: Tuple[Tuple[str, ...], ...] = ()
    real: str = ""
    weights: int = 0
    largest: int = 0
    headers: bool = True
    unusable: str = ""


def look(plan: Plan, timeout: float = 60) -> ModelFiles:
    """Look at the model's files as the unit's user, with the engine's interpreter alone. timeout: seconds."""
    try:
        question = json.dumps(list(_wanted(plan)))
        done = engine.run(plan, ["-I", "-S", "-c", PROBE], timeout, question)
        if done.returncode < 0:
            what = f"{plan.model_path}: the look at its files was killed by signal {-done.returncode}"
            return ModelFiles(((what, "see whether memory is short, and run the same command again"),))
        said = done.stdout if done.returncode == 0 else ""
        return (
            decode(ModelFiles, said) if said else ModelFiles(unusable=done.stderr.strip()[-200:] or "it ended at once")
        )
    except subprocess.TimeoutExpired:
        where = file_system(plan.model_path)
        what = f"{plan.model_path}: its files could not be looked at within {timeout:g} s"
        return ModelFiles(((what, f"see whether its file system is in order ({' at '.join(where)})"),))
    except (OSError, ValueError) as error:
        return ModelFiles(unusable=str(getattr(error, "strerror", None) or error))


def faults(plan: Plan, found: ModelFiles) -> List[HostFault]:
    if found.unusable:
        todo = "correct the path or its permissions"
        return [HostFault(f"user {plan.user} cannot execute {plan.python}: {found.unusable}", todo)]
    wrong = [HostFault(f"user {plan.user}: {what}", todo) for what, todo in found.faults]
    more = len(wrong) - SHOWN
    rest = HostFault(f"{more} more faults of the model's files", "correct those above first")
    return wrong[:SHOWN] + [rest] * (more > 0)


def notes(plan: Plan, found: ModelFiles) -> List[str]:
    lines = [f"{what}: {todo}" for what, todo in found.notes]
    kind, where = file_system(found.real or plan.model_path)
    if SLOW.match(kind):
        ahead = (
            "" if "weight-loader-prefetch-checkpoints" in plan.flags else "--weight-loader-prefetch-checkpoints, or "
        )
        lines.append(
            f"the model lies on {kind} ({where}), where loading by page faults is slow: "
            f"try {ahead}a longer `timeouts: ready` (now {plan.timeouts.ready:g} s)"
        )
    return lines


def _wanted(plan: Plan) -> Iterator[Tuple[str, str, Dict[str, Any]]]:
    """What to look at: the kind, the path, and how."""
    flags = plan.flags
    load = flags.get("load-format", "auto")
    given = flags.get("tokenizer-path", "")
    draft = flags.get("speculative-draft-model-path", "")
    own_draft = bool(re.fullmatch("NEXTN|EAGLE", flags.get("speculative-algorithm", ""))) and draft in (
        "",
        plan.model_path,
    )
    tokenizer = "skip-tokenizer-init" not in flags
    how = {"load_format": load, "tokenizer": tokenizer and not given, "mtp": own_draft}
    yield "model", plan.model_path, how
    if given.startswith("/") and tokenizer:
        yield "tokenizer", given, {}
    if draft.startswith("/") and draft != plan.model_path:
        yield "model", draft, {"load_format": flags.get("speculative-draft-load-format", load)}
    for path in _adapters(flags.get("lora-paths", "")):
        if path.startswith("/"):
            yield "adapter", path, {}
    for flag in FILES:
        if flags.get(flag, "").startswith("/"):
            yield "file", flags[flag], {}
    if questions := plan.verify.accuracy:
        yield "questions", questions.file, {"count": questions.questions}


# Flags that name a file which is read at the start; a chat template may also be the name of one that SGLang brings.
FILES = (
    "chat-template",
    "completion-template",
    "quantization-param-path",
    "speculative-token-map",
    "modelopt-checkpoint-restore-path",
    "init-expert-location",
    "pdmux-config-path",
    "speculative-ngram-external-corpus-path",
)


def _adapters(given: str) -> Iterator[str]:
    """PATH, NAME=PATH, or {"lora_name": ..., "lora_path": ...}, several of them."""
    try:
        words = [given] if given.startswith("{") else shlex.split(given)
    except ValueError:
        return
    for word in words:
        if word.startswith("{"):
            try:
                yield str(json.loads(word).get("lora_path", ""))
            except ValueError:
                continue
        else:
            yield word.partition("=")[2] or word


def file_system(path: str, table: Path = Path("/proc/self/mountinfo")) -> Tuple[str, str]:
    """The type of a path's file system and where that is mounted, without touching the path itself."""
    best = ("", "/")
    try:
        with table.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                left, _, right = line.partition(" - ")
                where = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), left.split()[4])
                inside = path == where or path.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(best[1]):  # of two mounts on one place the later one is seen
                    best = (right.split()[0], where)
    except (OSError, IndexError):
        pass
    return best
