"""The words of a running process, read back as SGLang's flags: as well as can be told without SGLang's parser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from kernelswap.sglang import canonical, is_flag, turned_off

Words = tuple[str, ...]


def flags_of(argv: Sequence[str]) -> dict[str, Words]:
    """The flags of a command line, each with its words; none for a bare flag, `false` for its negation.

    Given twice, the last one counts.
    """
    flags: dict[str, Words] = {}
    name = "model-path"  # `sglang serve MODEL`
    for word in argv[_begin(argv) :]:
        if is_flag(word):
            name, mark, value = word.lstrip("-").partition("=")
            off = turned_off(name)
            name = canonical(name)
            flags[name] = (value,) if mark else ("false",) * off
        else:
            flags[name] = (*flags.get(name, ()), word)
    return flags


def _begin(argv: Sequence[str]) -> int:
    """Where the launcher's own words begin: what stands before them is of Python, or of a wrapper."""
    for index, word in enumerate(argv):
        if word in ("sglang.launch_server", "-msglang.launch_server") or word.endswith("launch_server.py"):
            return index + 1
        if PurePosixPath(word).name == "sglang" and argv[index + 1 : index + 2] == ["serve"]:
            return index + 2
    return next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
