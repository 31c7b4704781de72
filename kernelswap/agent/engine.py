"""The SGLang that is installed on the host, asked as the unit's own user and in its environment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Mapping, Optional, Sequence, TextIO, Tuple

from kernelswap.agent import files, host
from kernelswap.agent.host import Folders
from kernelswap.agent.moe_tuning import Sought
from kernelswap.measured import Installed
from kernelswap.protocol import Gpu, Plan, decode, encode

PROBE = (pkgutil.get_data("kernelswap", "agent/engine_probe.py") or b"").decode()
MOE_PROBE = (pkgutil.get_data("kernelswap", "agent/moe_probe.py") or b"").decode()

# All that decides an answer and lies in files, as the unit's user sees it, without importing SGLang, as two digests: of
# its own files, in place or of an editable install, and what is installed beside it; and of what the command line
# names, the model's folder for one. A file system that hangs must hold this process, not the agent.
IDENTITY = """
import hashlib, importlib.util, json, os, sys
spec = importlib.util.find_spec("sglang")
seen = []
def note(path):
    try:
        stat = os.stat(path)
        seen.append((path, stat.st_size, stat.st_mtime_ns))
    except (OSError, ValueError):
        pass
for root in spec.submodule_search_locations or () if spec else ():
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                note(os.path.join(folder, name))
for folder in filter(os.path.isdir, sys.path):
    for name in os.listdir(folder):
        if name.endswith((".dist-info", ".pth", ".py", ".egg-link")):
            note(os.path.join(folder, name))
            note(os.path.join(folder, name, "RECORD"))
def digest():
    return hashlib.sha256(repr((sys.version, sorted(map(repr, seen)))).encode()).hexdigest()
engine = digest()
seen = []
for word in json.load(sys.stdin):
    path = word[word.find("=") + 1 :]
    note(path)
    try:
        for name in os.listdir(path):
            note(os.path.join(path, name))
        with open(os.path.join(path, "config.json"), "rb") as file:
            seen.append((path, hashlib.sha256(file.read()).hexdigest()))
    except (OSError, ValueError):
        pass
print(engine + " " + digest() if spec else "")
"""

# Its version as its files have it, in a second line: to import it takes seconds.
VERSION = """
import importlib.metadata, re
version = ""
for root in (spec.submodule_search_locations or ()) if spec else ():
    for name in ("_version.py", "version.py", "__init__.py"):
        try:
            with open(os.path.join(root, name)) as file:
                found = re.search("^__version__.*?[\\"']([^\\"']+)", file.read(), re.M)
        except OSError:
            continue
        version = version or (found[1] if found else "")
if spec and not version:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        pass
print(version)
"""

KEPT = 20  # answers of an instance
# The serving benchmark has moved (2026-07); its old name still works and warns.
JUDGES = {
    "throughput": ("sglang.benchmark.serving", "sglang.bench_serving"),
    "accuracy": ("sglang.test.few_shot_gsm8k",),
}


@dataclass(frozen=True)
class Answer:
    """What SGLang made of a command line.

    phase: where it stopped: start (it could not be asked), import, parse or resolve; "" if nowhere. refusal: its own
    words; unknown: why it could not say, which is no refusal. resolved: whether the rules across flags and for the
    architecture were asked too. values: its arguments by name, as JSON; given: those that the command line sets. moe:
    the tuning files that its Triton kernel for MoE layers will look for. missing: why what the verification needs of
    it cannot be imported, by the key under `verify`. engine: digest of its files, see IDENTITY; "" if unknown.
    """

    version: str = ""
    phase: str = ""
    refusal: str = ""
    unknown: str = ""
    resolved: bool = False
    values: Dict[str, str] = field(default_factory=dict)
    given: Dict[str, str] = field(default_factory=dict)
    warnings: Tuple[str, ...] = ()
    moe: Sought = field(default_factory=Sought)
    missing: Dict[str, str] = field(default_factory=dict)
    engine: str = ""


def run(
    plan: Plan,
    words: Sequence[str],
    timeout: float,
    stdin: str = "",
    extra: Optional[Dict[str, str]] = None,
    folder: str = "/",
) -> subprocess.CompletedProcess[str]:
    """Run the engine's interpreter as the unit's user. Raises OSError or subprocess.TimeoutExpired."""
    return subprocess.run(
        [plan.python, *words],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        **_as_the_unit(plan, extra or {}, folder),
    )


@contextlib.contextmanager
def process(
    plan: Plan, words: Sequence[str], folder: str, extra: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The same beside other work: in a session of its own, of which nothing is left afterwards. Raises OSError."""
    started = subprocess.Popen(
        [plan.python, *words], start_new_session=True, **streams, **_as_the_unit(plan, extra, folder)
    )
    try:
        yield started
    finally:
        if started.returncode is None:  # else its number may be another's by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def _as_the_unit(plan: Plan, extra: Mapping[str, str], folder: str) -> Dict[str, Any]:
    uid, gid = host.user_ids(plan.user)
    groups = os.getgrouplist(plan.user, gid)
    return {"cwd": folder, "env": {**plan.environment, **extra}, "user": uid, "group": gid, "extra_groups": groups}


@contextlib.contextmanager
def scratch(plan: Plan) -> Iterator[str]:
    """A folder of the unit's user, gone afterwards."""
    folder = tempfile.mkdtemp(prefix="kernelswap-")
    try:
        shutil.chown(folder, *host.user_ids(plan.user))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def asked(folders: Folders, plan: Plan, gpus: Sequence[Gpu] = ()) -> Iterator[Callable[[], Answer]]:
    """Ask SGLang what it makes of the command line; the answer is waited for when it is called for.

    gpus: those that the server will have, as NVML sees them. One process at most, and none where nothing has changed
    since the same was asked.
    """
    deadline = time.monotonic() + plan.timeouts.preflight
    with contextlib.ExitStack() as stack:
        try:
            seen = _seen_of(gpus)
            identity, kept = _place(folders, plan, seen)
            known = _recall(kept) if kept else None
            if known is None:
                probe, out, err = _start(stack, plan, seen)
        except subprocess.TimeoutExpired:
            known = _late(plan)
        except OSError as error:
            known = Answer(phase="start", refusal=f"{plan.python}: {error.strerror}")
        if known is not None:
            yield lambda: known
            return

        def answer() -> Answer:
            try:
                probe.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return _late(plan)
            found = replace(_read(out, err, probe.returncode), engine=identity)
            if kept and not found.refusal and not found.unknown:  # else another try may answer otherwise
                _keep(kept, found)
            return found

        yield answer


def _late(plan: Plan) -> Answer:
    what = f"it did not answer within the {plan.timeouts.preflight:g} s of `timeouts: preflight`"
    return Answer(phase="start", refusal=what)


def _start(
    stack: contextlib.ExitStack, plan: Plan, seen: Sequence[Mapping[str, Any]]
) -> Tuple[subprocess.Popen[bytes], TextIO, TextIO]:
    """The probe's process, ended with the stack, and the files of what it says. Raises OSError."""
    folder = stack.enter_context(scratch(plan))
    question, out, err = (stack.enter_context(_file()) for _ in range(3))
    json.dump({"argv": words_of(plan), "moe": MOE_PROBE, "needed": needed(plan)}, question)
    question.seek(0)
    # The unit's own cache folder is there from its first start on only.
    extra = {"HOME": folder, "TMPDIR": folder, "SGLANG_CACHE_DIR": folder, "KERNELSWAP_GPUS": json.dumps(seen)}
    streams = {"stdin": question, "stdout": out, "stderr": err}
    return stack.enter_context(process(plan, ["-c", PROBE], folder, extra, **streams)), out, err


def _file() -> ContextManager[TextIO]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _read(out: TextIO, err: TextIO, code: int) -> Answer:
    out.seek(0)
    with contextlib.suppress(ValueError):
        return decode(Answer, out.read())
    if code == -signal.SIGKILL:
        return Answer(phase="start", unknown="it was killed, as when memory is short")
    err.seek(0)
    lines = [line.strip() for line in err if line.strip()]
    return Answer(phase="import", refusal=lines[-1] if lines else f"SGLang ended with {code} when asked")


def words_of(plan: Plan) -> List[str]:
    """The words that SGLang itself reads; without those that pass secrets."""
    return list(plan.argv[plan.argv.index("-m") + 2 :]) if "-m" in plan.argv else list(plan.argv)


def needed(plan: Plan) -> Dict[str, Sequence[str]]:
    """The modules of SGLang by which it will be judged, by the key under `verify`; of each the newest name first."""
    return {name: modules for name, modules in JUDGES.items() if getattr(plan.verify, name)}


def _seen_of(gpus: Sequence[Gpu]) -> List[Dict[str, Any]]:
    """What the probe is told of the GPUs; nothing where NVML does not know them all."""
    if any(not gpu.capability or gpu.memory_total is None for gpu in gpus):
        return []
    return [
        {
            "capability": [int(part) for part in gpu.capability.split(".")],
            "name": gpu.name,
            "memory": (gpu.memory_total or 0) * 1024 * 1024,
            "driver": gpu.driver,
        }
        for gpu in gpus
    ]


def installed(plan: Plan, gpus: Sequence[Gpu]) -> Installed:
    """What a release runs on, as it is now. gpus: those that it has; what cannot be read is left empty."""
    version = identity = ""
    with contextlib.suppress(OSError, KeyError, subprocess.TimeoutExpired):
        said = run(plan, ["-c", IDENTITY + VERSION], min(60.0, plan.timeouts.preflight), "[]").stdout.splitlines()
        identity, version = [*said, "", ""][:2]
    drivers = {gpu.driver for gpu in gpus if gpu.driver}
    return Installed(version, identity, min(drivers, default=""), tuple(sorted(f"{g.uuid} {g.name}" for g in gpus)))


# The answers that are kept, by the digest of all that decides them.


def _place(folders: Folders, plan: Plan, seen: Sequence[Mapping[str, Any]]) -> Tuple[str, Optional[Path]]:
    """The engine's digest and where the answer is kept; "" and None where the engine cannot be told from another.
    Raises OSError, TimeoutExpired."""
    words = words_of(plan)
    named = json.dumps([word for word in words if "/" in word])
    identity = run(plan, ["-c", IDENTITY], plan.timeouts.preflight, named).stdout.strip()
    if not identity:
        return "", None
    decides = [
        PROBE,
        MOE_PROBE,
        plan.python,
        identity,
        plan.user,
        plan.environment,
        words,
        seen,
        needed(plan),
    ]
    name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return identity.split()[0], folders.answers / f"{name}.json"


def _recall(path: Path) -> Optional[Answer]:
    try:
        found = decode(Answer, files.read(path) or "")
        path.touch()
    except (OSError, ValueError):
        return None
    return found


def _keep(path: Path, answer: Answer) -> None:
    with contextlib.suppress(OSError):  # it is asked again then
        files.write(path, encode(answer), mode=0o600)
        newest = sorted(path.parent.glob("*.json"), key=lambda entry: entry.stat().st_mtime, reverse=True)
        for old in newest[KEPT:]:
            files.remove(old)
