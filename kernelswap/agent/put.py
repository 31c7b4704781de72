"""Puts files on a host: each whole or not at all, on the disk before it gets its name, and never readable by others on
the way there.

It comes along as `python3 -c` to hosts that may have no agent yet, so it stands alone. Standard input, as base64 of
zlib: a JSON line with the path, mode, size and `create` of each file, then their contents one after the other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path


def put(path: Path, content: bytes, mode: int, create: bool) -> None:
    """Write a file and make its folders. create: fail if there is one, made by somebody else since we looked.

    Raises OSError.
    """
    make_folder(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        if create:
            os.link(name, path)
        else:
            Path(name).replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def make_folder(path: Path) -> None:
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def main() -> int:
    os.umask(0o022)
    try:
        # Cut short it has no end that zlib knows: not every way to become root passes standard input on.
        header, _, contents = zlib.decompress(base64.b64decode(sys.stdin.buffer.read())).partition(b"\n")
    except (ValueError, zlib.error) as error:
        return _failed(f"the files did not arrive whole on standard input ({error})")
    for file in json.loads(header):
        content, contents = contents[: file["size"]], contents[file["size"] :]
        try:
            put(Path(file["path"]), content, file["mode"], file["create"])
        except OSError as error:
            return _failed(f"could not write {file['path']}: {error}")
    return 0


def _failed(why: str) -> int:
    print(f"kernelswap: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
