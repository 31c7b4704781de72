"""An agent's bytecode, kept beside its file. Out of a zipapp Python compiles every module anew at every start.

The file's name holds the digest of the sources and the kind of bytecode, see bundle.py: that of another agent or of
another Python is never taken, and where there is none the agent runs from its sources.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from py_compile import PycInvalidationMode

from kernelswap.agent import files


def keep(archive: Path, bytecode: Path) -> int:
    """Compile the modules of an agent's file; forget the bytecode of the agents before it."""
    try:
        with tempfile.TemporaryDirectory(prefix=files.NEW, dir=archive.parent) as folder:
            new = Path(folder) / bytecode.name
            _compile(archive, Path(folder) / "modules", new)
            new.replace(bytecode)
        files.sync_folder(archive.parent)
    except (OSError, zipfile.BadZipFile) as error:
        print(f"kernelswap: the agent goes without its bytecode, slowly: {error}", file=sys.stderr)
        return 1
    for other in archive.parent.glob(f"{archive.stem}-*.zip"):
        if other != bytecode:
            with contextlib.suppress(OSError):
                other.unlink()
    return 0


def _compile(archive: Path, folder: Path, new: Path) -> None:
    with zipfile.ZipFile(archive) as source:
        source.extractall(folder)
    # Taken without a look at the source, which stays beside it for what is read as text (probes, tracebacks).
    unchecked = PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder, quiet=2, legacy=True, ddir=str(archive), invalidation_mode=unchecked)
    with new.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    target.write(path, path.relative_to(folder))
        file.flush()
        os.fsync(file.fileno())
