"""Put a file on a host whose content must not show: not in --diff, not at -vvv, not in an error, not in `ps`."""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping
from typing import Any

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host as current_host

from kernelswap.render import Hidden

# Whole or not at all, on the disk before it gets its name, and never readable by others on the way there. The size is
# checked because not every way to become root passes standard input on.
SCRIPT = """umask 077; t=$(mktemp {path}.XXXXXX) || exit 1; trap 'rm -f "$t"' EXIT
base64 -d >"$t" && [ "$(wc -c <"$t")" -eq {size} ] && chmod {mode} "$t" && sync "$t" &&
{name} && sync {folder} && exit 0
echo "kernelswap: could not write "{path} >&2; exit 1"""
RENAME = 'mv -fT "$t" {path}'
# Fails if somebody else has made the file since we looked.
CREATE = 'ln -T "$t" {path}'


@operation()
def place(
    path: str, content: Hidden | bytes, mode: str = "600", create: bool = False
) -> Generator[StringCommand, None, None]:
    """
    Write a file through standard input, in one remote command.

    + path: where; its folder must exist
    + content: the file's bytes
    + mode: its mode; the owner is root
    + create: fail if the file is there already
    """
    data = content.reveal().encode() if isinstance(content, Hidden) else content
    quoted = {"path": QuoteString(path), "folder": QuoteString(path.rpartition("/")[0]), "mode": QuoteString(mode)}
    name = _fill(CREATE if create else RENAME, quoted)
    script = _fill(SCRIPT, {**quoted, "size": str(len(data)), "name": name})
    # What the way to root reads from standard input, see root.py, comes first.
    given: Mapping[str, Any] = current_host.current_op_global_arguments or {}
    before = given.get("_stdin") or []
    yield StringCommand(*script.bits, _separator="", _stdin=[*before, base64.encodebytes(data).decode()])


def _fill(template: str, values: Mapping[str, object]) -> StringCommand:
    """The template with each {name} replaced, quoted for the shell where its value is a QuoteString."""
    bits: list[object] = []
    rest = template
    while "{" in rest:
        before, _, rest = rest.partition("{")
        name, _, rest = rest.partition("}")
        bits += [before, values[name]]
    return StringCommand(*bits, rest, _separator="")
