"""What a converge that changes nothing costs, against the floor: pyinfra connects and runs one command.

Needs a lab on which every host serves its declared profile (`make lab`, then `pyinfra inventory/lab.py deploy.py -y`).
Prints the result and keeps it under benchmarks/results/.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PAIRS = 7
ROOT = Path(__file__).parent.parent
PYINFRA = [str(Path(sys.executable).parent / "pyinfra"), "inventory/lab.py"]
COMMANDS = {"converge": [*PYINFRA, "deploy.py", "-y"], "floor": [*PYINFRA, "exec", "-y", "--", "true"]}


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for pair in range(PAIRS + 1):
        for name in sorted(COMMANDS, reverse=bool(pair % 2)):
            spent = timed(COMMANDS[name])
            if pair:  # the first pair warms up
                seconds[name].append(spent)
    ratios = [ours / floor for ours, floor in zip(seconds["converge"], seconds["floor"], strict=True)]
    result = {
        "hosts": len((lab_folder() / "hosts").read_text().splitlines()),
        "pairs": PAIRS,
        "cores": os.cpu_count(),
        **{f"{name}_s": spread(values) for name, values in seconds.items()},
        "ratio": spread(ratios),
    }
    text = json.dumps(result, indent=2)
    print(text)
    (ROOT / "benchmarks/results/noop.json").write_text(text + "\n")


def lab_folder() -> Path:
    return Path(os.environ.get("KERNELSWAP_LAB") or ROOT / ".lab")


def timed(command: Sequence[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    spent = time.perf_counter() - start
    if done.returncode or "Swap" in done.stdout:
        raise SystemExit(
            f"{' '.join(command)} failed, or a host did not serve its profile:\n{done.stdout}{done.stderr}"
        )
    return spent


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = min(values), statistics.median(values), max(values)
    return {"min": round(low, 3), "median": round(middle, 3), "max": round(high, 3)}


if __name__ == "__main__":
    main()
