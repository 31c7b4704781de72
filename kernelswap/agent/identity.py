"""What a process is, told from its words, its title and its program: SGLang, another engine, or neither.

Never from a pattern over a whole command line: `tail -f sglang.log` is no server. Names: knowledge/processes.json.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import PurePosixPath
from typing import Any, Dict, List, Sequence, Tuple

from kernelswap.agent import knowledge

SHELL = re.compile(r"(.*/)?(sh|bash|dash|zsh|ksh|perl|node|ruby)")
PYTHON = re.compile(r"python[\d.]*")


@functools.cache
def known() -> Dict[str, Any]:
    table: Dict[str, Any] = json.loads(knowledge.read("processes.json"))
    return table


def is_server(argv: Sequence[str], exe: str = "") -> bool:
    """Whether it is the main process of an SGLang server, or a wrapper that runs nothing else."""
    servers = known()["servers"]
    return not set(servers["questions"]) & set(argv) and bool(
        re.match(servers["pattern"], command(*_unwrapped(list(argv), exe)))
    )


def is_worker(argv: Sequence[str], comm: str = "") -> bool:
    """Whether it is a process that an SGLang server starts for itself and that says so by its title."""
    workers = known()["workers"]
    return bool(re.match(workers["title"], title(argv, comm))) or _matches(workers, command(argv))


def is_python_child(argv: Sequence[str]) -> bool:
    """Whether Python's multiprocessing started it; whose it is its words do not tell."""
    return bool(re.match(known()["workers"]["child"], command(argv)))


def engine(argv: Sequence[str], comm: str = "", exe: str = "") -> str:
    """The name of what else it may be (`vLLM engine`); "" if it is none that we know."""
    what, shown = command(argv, exe), title(argv, comm)
    for other in known()["others"]:
        if _matches(other, what) or ("title" in other and re.match(other["title"], shown)):
            return str(other["name"])
    return ""


def is_harmless(argv: Sequence[str], comm: str = "") -> bool:
    """Whether it may hold a GPU's node without being in the way."""
    return _matches(known()["harmless"], command(argv) or comm)


def is_wrapper(argv: Sequence[str]) -> bool:
    wrappers = known()["wrappers"]
    return name(argv) in wrappers["run_one"] + wrappers["shells"]


def is_spawner(argv: Sequence[str], comm: str = "") -> bool:
    return any(part in known()["spawners"]["names"] for part in (name(argv), comm))


def is_python(argv: Sequence[str], exe: str = "") -> bool:
    paths = [*argv[:1], exe]
    return any(PYTHON.fullmatch(PurePosixPath(path).name) for path in paths if path)


def is_script(argv: Sequence[str], exe: str = "") -> bool:
    """Whether an interpreter runs a file."""
    if is_python(argv, exe):
        return name(argv) not in ("-m", "-c", "python")
    return bool(argv and SHELL.fullmatch(argv[0]))


def title(argv: Sequence[str], comm: str) -> str:
    """What setproctitle left. A main thread's name says more than the words that multiprocessing began with."""
    first = argv[0] if argv else ""
    return first if first and not ("::" in comm and is_python_child(argv)) else comm


def name(argv: Sequence[str]) -> str:
    """The program's name: of the script where an interpreter runs one."""
    what = command(argv)
    return PurePosixPath(what.split(" ", 1)[0]).name


def command(argv: Sequence[str], exe: str = "") -> str:
    """What runs and its first word: `-m sglang.launch_server --model-path`, `sglang serve`, `vllm serve`, `train.py`.

    exe: the program's file, for words whose first one lies.
    """
    words = [word for word in argv if word]
    if not words:
        return ""
    python = is_python(words, exe)
    what = _python(words[1:]) if python else words
    if not what:
        return "python"
    path = PurePosixPath(what[0])
    # A script of SGLang's is known with its folder; the words of `-m x` and `-c code` are no paths.
    if python and what[0].startswith("-"):
        first = what[0]
    else:
        first = f"{path.parent.name}/{path.name}" if path.suffix == ".py" else path.name
    return " ".join([first, *what[1:2]])


def _python(words: Sequence[str]) -> List[str]:
    """What an interpreter runs: [`-m module`, words], [`-c code`, words], [script, words] or nothing."""
    index = 0
    while index < len(words):
        word, rest = words[index], list(words[index + 1 :])
        option = re.fullmatch(r"-([bBdEhiIOPqsSuvVx?]*)([mc])(.*)", word, re.DOTALL)
        if option:
            value = [option[3]] if option[3] else rest[:1]
            return [f"-{option[2]} {' '.join(value)}", *rest[0 if option[3] else 1 :]]
        if not word.startswith("-"):
            return [word, *rest]
        index += 2 if word in ("-W", "-X", "--check-hash-based-pycs") else 1
    return []


# What stands between a wrapper and its command, besides options and their values.
ARGUMENT = re.compile(r"[\da-fx.,:-]+[smhd]?|run|profile|\w+=.*|", re.DOTALL)


def _unwrapped(words: List[str], exe: str) -> Tuple[List[str], str]:
    """The command that wrappers run, as its words; the program's file is of the outermost only."""
    while name(words) in known()["wrappers"]["run_one"]:
        index = 1
        while index < len(words) and not _begins_command(words, index):
            if not (
                words[index].startswith("-") or words[index - 1].startswith("-") or ARGUMENT.fullmatch(words[index])
            ):
                return [], ""
            index += 1
        words, exe = words[index:], ""
    return words, exe


def _begins_command(words: Sequence[str], index: int) -> bool:
    word = PurePosixPath(words[index]).name
    if "=" in words[index].split("/", 1)[0]:
        return False
    return bool(
        PYTHON.fullmatch(word)
        or (word == "sglang" and words[index + 1 : index + 2] == ["serve"])
        or word in known()["wrappers"]["run_one"]
    )


def _matches(entry: Dict[str, Any], what: str) -> bool:
    return "pattern" in entry and bool(re.match(entry["pattern"], what))
