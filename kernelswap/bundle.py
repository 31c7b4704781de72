"""Build the agent as a zipapp: one file that any host with python3 can run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGE = Path(__file__).parent
SHARED = (
    "__init__.py",
    "backends.py",
    "ledger.py",
    "measured.py",
    "protocol.py",
    "seal.py",
    "verdict.py",
)

# Where the bytecode is kept, see agent/compiled.py, it goes first. What works for long imports and reads everything
# before it starts, so that replacing the file in the middle of a swap does not matter. A question is answered in a
# moment, and it is asked often: it takes what it needs only.
MAIN = """import sys

if sys.version_info < (3, 9):
    sys.exit(f"kernelswap: {{sys.executable}} {{sys.version.split()[0]}} is too old: install Python 3.9 or newer")
sys.path.insert(0, f"{{sys.path[0].removesuffix('.pyz')}}-{digest}.{{sys.implementation.cache_tag}}.zip")

from kernelswap.agent.__main__ import main

if sys.argv[1:2] in (["swap"], ["run"], ["recover"]):
{imports}

if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True)
class Bundle:
    """The agent's file and the BLAKE2b by which a host's copy is known to be this one."""

    content: bytes
    digest: str

    def __repr__(self) -> str:
        return f"Bundle({self.digest[:12]}, {len(self.content)} bytes)"

    @cached_property
    def packed(self) -> str:
        """For the way to a host: gzip in base64, a quarter as long."""
        return base64.b64encode(gzip.compress(self.content, mtime=0)).decode()


@cache
def build() -> Bundle:
    """The agent of this installation; the same installation always gives the same bytes.

    Stored, not deflated: another zlib would give other bytes, and two controllers would replace each other's agent.
    """
    files = dict(_files())
    files["__main__.py"] = MAIN.format(imports=_imports(files), digest=_digest(files)).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name])
    content = buffer.getvalue()
    return Bundle(content, hashlib.blake2b(content).hexdigest())


def _digest(files: Mapping[str, bytes]) -> str:
    sums = [(name, hashlib.sha256(files[name]).hexdigest()) for name in sorted(files)]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _files() -> Iterator[tuple[str, bytes]]:
    for name in SHARED:
        yield f"kernelswap/{name}", (PACKAGE / name).read_bytes()
    for pattern in ("agent/**/*.py", "knowledge/*.json"):
        for path in PACKAGE.glob(pattern):
            yield f"kernelswap/{path.relative_to(PACKAGE).as_posix()}", path.read_bytes()
    yield "pynvml.py", _pynvml().read_bytes()


def _pynvml() -> Path:
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("pynvml is missing: pip install nvidia-ml-py")
    return Path(spec.origin)


def _imports(files: dict[str, bytes]) -> str:
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    knowledge = sorted(Path(name).name for name in files if name.endswith(".json"))
    lines = [f"import {module}" for module in modules]
    lines += [f"kernelswap.agent.knowledge.read({name!r})" for name in knowledge]
    return "\n".join(f"    {line}" for line in lines)
