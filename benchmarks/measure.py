"""Times commands, and keeps results with the machine that they were measured on."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
RESULTS = ROOT / "benchmarks" / "results"

# Bytecode is written and used, as with whoever runs a command twice.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

# The lab and its projects are the tests'.
sys.path.append(str(ROOT / "tests" / "lab"))


@dataclass(frozen=True)
class Cost:
    """What a command took. wall, cpu: seconds, of all its processes; memory: MiB of the largest of them."""

    wall: float
    cpu: float
    memory: float
    output: str


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end. One that fails ends the benchmark: what it took would mean nothing."""
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**ENVIRONMENT, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{text[-4000:]}")
    return Cost(wall, _cpu(used), used.ru_maxrss / 1024, text)


def _cpu(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    known = list(values)
    low, middle, high = min(known), statistics.median(known), max(known)
    return {"median": round(middle, digits), "min": round(low, digits), "max": round(high, digits)}


def shown(values: Mapping[str, float], digits: int = 2) -> str:
    """For a table: the median, and how far apart the runs were."""
    return f"{values['median']:.{digits}f} ({values['min']:.{digits}f} to {values['max']:.{digits}f})"


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyinfra": version("pyinfra"),
        "kernelswap": version("kernelswap"),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def keep(name: str, title: str, result: Mapping[str, Any], text: str) -> None:
    """Print a result, and keep it as JSON and as Markdown."""
    on = result["machine"]
    where = (
        f"{on['date']}, {on['cores']} cores ({on['processor']}), {on['memory_gib']} GiB, Linux {on['kernel']}, "
        f"Python {on['python']}, pyinfra {on['pyinfra']}; load before: {', '.join(map(str, on['load_before']))}"
    )
    page = f"# {title}\n\n{where}\n\n{text.strip()}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(page)
    print(page)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
