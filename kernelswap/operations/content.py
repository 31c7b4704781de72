"""Put files on a host whose content must not show: not in --diff, not at -vvv, not in an error, not in `ps`."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host as current_host

from kernelswap import agent
from kernelswap.facts.agent import ALONE
from kernelswap.render import Hidden
from kernelswap.root import Unshown


@dataclass(frozen=True)
class File:
    """A file as it is to be on a host, owned by root. create: fail if it is there already."""

    path: str
    content: Hidden | bytes | str = field(repr=False)
    mode: int = 0o644
    create: bool = False

    @property
    def data(self) -> bytes:
        content = self.content.reveal() if isinstance(self.content, Hidden) else self.content
        return content if isinstance(content, bytes) else content.encode()


@operation()
def place(files: Sequence[File]) -> Generator[StringCommand, None, None]:
    """
    Write files and the folders that they need, through standard input, in one remote command.

    + files: what is to be there
    """
    # What the way to root reads from standard input, see root.py, comes first.
    given: Mapping[str, Any] = current_host.current_op_global_arguments or {}
    before = given.get("_stdin") or []
    yield StringCommand(ALONE, "-c", QuoteString(_script()), _stdin=[*before, Unshown(packed(files))])


@cache
def _script() -> str:
    return Path(agent.__path__[0], "put.py").read_text(encoding="utf-8")


def packed(files: Sequence[File]) -> str:
    """The files as agent/put.py reads them."""
    header = [{"path": f.path, "mode": f.mode, "size": len(f.data), "create": f.create} for f in files]
    content = b"".join([json.dumps(header).encode(), b"\n", *(file.data for file in files)])
    return base64.b64encode(zlib.compress(content, level=1)).decode()
