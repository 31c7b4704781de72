"""An agent's bytecode and digest, kept beside its file: out of a zipapp Python compiles each module anew at each start.

The file's name holds the digest of the sources and the kind of bytecode, see bundle.py: that of another agent or of
another Python is never taken, and where there is none the agent runs from its sources. The glance, which starts without
the agent, has a file of its own, see facts/host_state.py; Python itself refuses that of another Python.
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

from kernelswap.agent import files, glance
from kernelswap.protocol import glance_bytecode

GLANCE = "kernelswap/agent/glance.py"


def keep(archive: Path, bytecode: Path) -> None:
    """Compile the modules of an agent's file, or say why not; forget the bytecode of the agents before it."""
    try:
        with tempfile.TemporaryDirectory(prefix=files.NEW, dir=archive.parent) as folder:
            new, modules = Path(folder) / bytecode.name, Path(folder) / "modules"
            _compile(archive, modules, new)
            short = archive.parent / glance_bytecode((modules / GLANCE).read_bytes())
            compiled = (modules / GLANCE).with_suffix(".pyc")
            with compiled.open("rb") as file:
                os.fsync(file.fileno())
            compiled.replace(short)
            new.replace(bytecode)
        _keep_digest(archive)
        files.sync_folder(archive.parent)
    except (OSError, zipfile.BadZipFile) as error:
        # Nobody's swap is to fail for it.
        print(f"kernelswap: the agent goes without its bytecode, slowly: {error}", file=sys.stderr)
        return
    for other in (*archive.parent.glob(f"{archive.stem}-*.zip"), *archive.parent.glob("glance-*.pyc")):
        if other not in (bytecode, short):
            with contextlib.suppress(OSError):
                other.unlink()


def _keep_digest(archive: Path) -> None:
    """Whoever changes the file changes its times, and then the digest counts for nothing."""
    now = archive.stat()
    digest = glance.digest(str(archive), "blake2b")
    numbers = (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    files.write(archive.with_name(archive.name + glance.DIGEST), " ".join(map(str, (digest, *numbers))))


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
