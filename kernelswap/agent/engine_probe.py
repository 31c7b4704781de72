"""Asks the SGLang of the interpreter that runs this what it makes of a command line, and takes no GPU memory.

engine.py gives the text of this file to the engine's interpreter, as the unit's user; so it imports nothing of ours and
runs on any Python from 3.8 on. On stdin: {"argv": [...], "moe": the text of moe_probe.py, "needed": {"throughput":
[modules, the newest name first], ...}}. KERNELSWAP_GPUS: what NVML says of the GPUs that the server will have,
[{"capability": [9, 0], "name": ..., "memory": bytes}, ...]. On stdout one line of JSON, see engine.Answer.

The old server may fill the GPUs, and a CUDA context of ours could take the memory of its next request. So torch
answers from NVML what it would ask of CUDA (architecture, name, memory), and every road into CUDA is closed: what needs
one ends as `unknown`, which is no refusal. Sources: SGLang 0.5.23 server_args.py (prepare_server_args returns the raw
input, resolve_once decides; older releases decide when they are made), torch 2.x cuda/__init__.py (_lazy_init).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from typing import Any, Dict, Iterator, List, NoReturn, TextIO


class Untouchable(RuntimeError):
    """Something wants a CUDA context."""


# What a failure says that is this moment's and not the command line's.
UNKNOWN = ("CUDA error", "CUDA out of memory", "out of memory", "CUDA driver", "CUDA initialization", "NVML")


def main() -> None:
    gc.disable()  # a fifth of the time, which is spent on imports; the memory is given back soon
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    question = json.load(sys.stdin)
    gpus = json.loads(os.environ.pop("KERNELSWAP_GPUS", "[]"))
    answer = {"version": "", "phase": "import", "refusal": "", "unknown": "", "resolved": False}
    try:
        leave_gpus_alone(gpus)
        now = ask(question["argv"], answer)
        answer["moe"] = tuning_files(question.get("moe", ""), now, gpus)
        answer["missing"] = missing(question.get("needed", {}))
    except BaseException as error:
        text = words_of(error)
        kind = "unknown" if is_of_the_moment(error) else "refusal"
        answer[kind] = text
        if answer["phase"] == "parse" and not isinstance(error, SystemExit):  # it was taken, and then not
            answer["phase"] = "resolve"
    answer_to.write(json.dumps(answer) + "\n")
    answer_to.flush()
    os._exit(0)  # threads of what was imported must not keep us


def ask(argv: List[str], answer: Dict[str, Any]) -> Dict[str, Any]:
    """Its arguments, resolved where that can be."""
    with heard() as said:
        try:
            import sglang

            answer["version"] = str(getattr(sglang, "__version__", ""))
            from sglang.srt.server_args import prepare_server_args

            answer["phase"] = "parse"
            args = prepare_server_args(argv)
            names = names_of(args)
            now = raw = {name: getattr(args, name, None) for name in names}
            answer["values"] = plain(raw)
            answer["given"] = plain({name: value for name, value in raw.items() if is_given(args, name, value)})
            answer["phase"] = "resolve"
            for step in ("resolve_once", "check_server_args"):  # as at the launch; older releases have one, or none
                if hasattr(args, step):
                    getattr(args, step)()
            if hasattr(args, "resolve_once"):
                found = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
                now = {name: found[name] for name in names if name in found}
                answer["values"] = plain(now)
            # Before resolve_once came (2026), a dataclass had decided when it was made.
            answer["resolved"] = hasattr(args, "resolve_once") or hasattr(type(args), "__post_init__")
            answer["phase"] = ""
            return now
        finally:
            answer["warnings"] = said


def tuning_files(text: str, values: Dict[str, Any], gpus: List[Dict[str, Any]]) -> Dict[str, Any]:
    """What moe_probe.py, given as text, finds; nothing where a release of SGLang is not as it expects."""
    space: Dict[str, Any] = {"__name__": "moe_probe"}
    with contextlib.suppress(Exception):
        exec(text, space)  # noqa: S102 - our own
        return dict(space["tuning_files"](values, gpus[0]["name"]))
    return {}


def missing(needed: Dict[str, List[str]]) -> Dict[str, str]:
    """Why what the verification needs cannot be imported. Other errors of it are for the moment when it runs."""
    found = {}
    for what, names in needed.items():
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError as error:
                found[what] = words_of(error)
                if not f"{name}.".startswith(f"{error.name}."):  # it is there, and something else is not
                    break
                continue
            except BaseException:  # noqa: S110 - see above
                pass
            found.pop(what, None)
            break
    return found


def leave_gpus_alone(gpus: List[Dict[str, Any]]) -> None:
    with contextlib.suppress(ImportError):
        import torch

        def closed(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise Untouchable("this asks the GPU itself, which the preflight leaves alone")

        torch.cuda._lazy_init = closed
        if not gpus:
            return

        def gpu(device: Any = None) -> Dict[str, Any]:
            index = getattr(device, "index", device)
            return gpus[index if isinstance(index, int) and 0 <= index < len(gpus) else 0]

        class Properties:
            def __init__(self, device: Any = None) -> None:
                self.name, self.total_memory = gpu(device)["name"], gpu(device)["memory"]
                self.major, self.minor = gpu(device)["capability"]
                self.is_integrated = False

            def __getattr__(self, name: str) -> NoReturn:
                raise Untouchable("this asks the GPU itself for its " + name)

        torch.cuda.get_device_capability = lambda device=None: tuple(gpu(device)["capability"])
        torch.cuda.get_device_name = lambda device=None: gpu(device)["name"]
        torch.cuda.get_device_properties = Properties
        torch.cuda.mem_get_info = lambda device=None: (gpu(device)["memory"], gpu(device)["memory"])
        torch.cuda.current_device = lambda: 0


@contextlib.contextmanager
def heard() -> Iterator[List[str]]:
    """What SGLang warns of that is about its arguments; importing it brings other warnings."""
    said: List[str] = []

    def hear(text: str, path: str) -> None:
        line = " ".join(re.sub("\x1b\\[[0-9;]*m", "", text).split())
        module = path.rpartition(os.sep + "sglang" + os.sep)[2]
        about = any(part in module for part in ("server_args", "arg_groups", "environ.py", "configs"))
        if (about or "--" in line) and line not in said:
            said.append(line)

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(Exception):
                hear(record.getMessage(), record.pathname)

    handler = Hear(logging.WARNING)
    logging.getLogger("sglang").addHandler(handler)  # a handler of the root logger is dropped by the parser
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield said
        finally:
            for warning in caught:
                if os.sep + "sglang" + os.sep in warning.filename:
                    hear(str(warning.message), warning.filename)
            logging.getLogger("sglang").removeHandler(handler)


def names_of(args: Any) -> List[str]:
    names = list(getattr(args, "__dict__", ()))
    if hasattr(type(args), "__struct_fields__"):  # msgspec
        names = list(type(args).__struct_fields__)
    elif dataclasses.is_dataclass(args):
        names = [field.name for field in dataclasses.fields(args)]
    return [name for name in names if not name.startswith("_")]


def is_given(args: Any, name: str, value: Any) -> bool:
    """Whether the command line says it: a plain value that is not the default."""
    kind = type(args)
    if not isinstance(value, (str, int, float)):
        return False
    if hasattr(kind, "__struct_fields__"):
        at = list(kind.__struct_fields__).index(name) - len(kind.__struct_fields__)  # defaults are those of the last
        defaults = kind.__struct_defaults__
        return at < -len(defaults) or bool(value != defaults[at])
    return hasattr(kind, name) and bool(value != getattr(kind, name))


def plain(values: Dict[str, Any]) -> Dict[str, str]:
    """Each value as JSON; what is none, as its text."""

    def other(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))

    return {name: json.dumps(value, sort_keys=True, default=other) for name, value in values.items()}


def words_of(error: BaseException) -> str:
    """The error in one line. argparse has told on stderr what it has against the words."""
    if isinstance(error, SystemExit):
        told = sys.stderr.getvalue().splitlines() if isinstance(sys.stderr, Told) else []
        lines = [line for line in told if ": error: " in line] or told[-1:]
        return lines[-1].partition(": error: ")[2] or lines[-1] if lines else f"it ends with {error.code}"
    text = " ".join(str(error).split())
    if text and isinstance(error, (ValueError, AssertionError, NotImplementedError)):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    rest = f": {text}" if text else f" ({frames[-1].line})" if frames else ""
    return type(error).__name__ + rest


def is_of_the_moment(error: BaseException | None) -> bool:
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (Untouchable, MemoryError, KeyboardInterrupt)):
            return True
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in UNKNOWN):
            return True
        error = error.__cause__ or error.__context__
    return False


class Told(io.StringIO):
    """stderr, remembered."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        super().write(text)
        return self.stream.write(text)


if __name__ == "__main__":
    sys.stderr = Told(sys.stderr)
    main()
