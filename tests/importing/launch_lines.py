"""The cases: `cases/NAME`, a text that people launch servers with, and `cases/NAME.out`, what is printed for it.

The first line of a text may hold options: `# import --path /srv/models/x`.
"""

from __future__ import annotations

import shlex
import sys
from functools import cache
from pathlib import Path

from click.testing import CliRunner, Result

from kernelswap.cli import main
from kernelswap.importing import Imported, Wishes, read
from kernelswap.library import load_library
from kernelswap.render import preview
from kernelswap.spec import server_spec

ROOT = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "cases"
NAMES = sorted(path.name for path in CASES.iterdir() if path.suffix != ".out")


def options(name: str) -> list[str]:
    first = (CASES / name).read_text().split("\n")[0]
    return shlex.split(first.removeprefix("# import")) if first.startswith("# import ") else []


@cache
def run(name: str, *more: str) -> Result:
    return CliRunner().invoke(main, ["import", str(CASES / name), *options(name), *more])


def said(result: Result) -> str:
    """All that a run prints, its findings below its files."""
    return f"{result.stdout}=== findings, exit {result.exit_code}\n{result.stderr}"


def imported(name: str, **wishes: str) -> Imported:
    return read((CASES / name).read_text(), name, Wishes(**wishes))  # type: ignore[arg-type]


def rendered(result: Imported, folder: Path) -> list[str]:
    """SGLang's words of the unit that the two files make."""
    for kind, name, text in (
        ("models", result.model, result.model_text),
        ("profiles", result.profile, result.profile_text),
    ):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{name}.yaml").write_text(text)
    spec = server_spec(load_library(folder), "main", result.model, result.profile)
    return list(preview(spec, ROOT / "templates").plan.argv[2:])


if __name__ == "__main__":
    # Writes what is printed today; read the difference before it is committed.
    for each in sys.argv[1:] or NAMES:
        (CASES / f"{each}.out").write_text(said(run(each)))
