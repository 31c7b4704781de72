"""Traces of GPUs as data (`tests/traces/*.json`), spread out to the files that a sampler would have written.

A trace has what its GPUs show in common, and segments in which some of it differs: `seconds`, `phase`, and under `gpus`
what one GPU shows otherwise. A list of two numbers is a range. `server`: its counters, which `server_later` changes
`after` so many seconds. `expect`: the first finding; `also`: one of the others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelswap.measured import GPU_COLUMNS, SERVER_COLUMNS

TRACES = Path(__file__).parent / "traces"
FIELDS = [name for name in GPU_COLUMNS if name not in ("time", "phase", "index", "uuid", "name")]


@dataclass(frozen=True)
class Script:
    """One trace. step: seconds between samples; noise: relative, of every reading; seed: of noise and ranges."""

    name: str
    data: dict[str, Any] = field(repr=False)

    @property
    def expect(self) -> str:
        return str(self.data["expect"])

    @property
    def segments(self) -> list[dict[str, Any]]:
        return list(self.data["segments"])

    def rows(self, step: float = 1.0, noise: float = 0.0, seed: int = 1, begin: float = 1.8e9) -> list[dict[str, Any]]:
        chance = random.Random(seed)  # noqa: S311
        at = begin
        rows = []
        for segment in self.segments:
            for _ in range(max(1, round(segment["seconds"] / step))):
                for gpu in range(self.data["gpus"]):
                    shown = {**self.data["common"], **segment, **segment.get("gpus", {}).get(str(gpu), {})}
                    values = {name: reading(name, shown.get(name), noise, chance) for name in FIELDS}
                    who = {"index": gpu, "uuid": f"GPU-{gpu}", "name": self.data["name"]}
                    rows.append({"time": at + gpu / 1000, "phase": segment.get("phase", ""), **who, **values})
                at += step
        return rows

    def bench(self) -> str:
        return "".join(json.dumps(run) + "\n" for run in self.data.get("bench", []))

    def server(self, rows: list[dict[str, Any]]) -> str:
        """The server's counters at the times of these rows; "" if the trace has none."""
        said = self.data.get("server")
        lines = [",".join(SERVER_COLUMNS)]
        for at, phase in dict.fromkeys((row["time"], row["phase"]) for row in rows if row["index"] == 0):
            later = [change for change in self.data.get("server_later", []) if at - rows[0]["time"] >= change["after"]]
            values = {"time": at, "phase": phase, **(said or {}), **(later[-1] if later else {})}
            lines.append(",".join(str(values.get(name, "")) for name in SERVER_COLUMNS))
        return "\n".join(lines) + "\n" if said else ""


def reading(name: str, value: Any, noise: float, chance: random.Random) -> float | None:
    if value is None:
        return None
    shown = chance.uniform(*value) if isinstance(value, list) else float(value)
    if name in ("power", "sm_clock", "temperature", "pcie_rx", "pcie_tx", "utilization", "memory_utilization"):
        shown *= 1 + chance.gauss(0, noise)
    if name.endswith("utilization"):
        shown = min(100.0, max(0.0, shown))
    return round(shown, 1) if name == "power" else float(round(shown))


def scripts() -> Iterator[Script]:
    for path in sorted(TRACES.glob("*.json")):
        yield Script(path.stem, json.loads(path.read_text()))


SCRIPTS = {script.name: script for script in scripts()}


def ours(rows: list[dict[str, Any]]) -> str:
    """As the agent's gpu.csv."""
    lines = [",".join(GPU_COLUMNS.values())]
    for row in rows:
        lines.append(",".join(cell(name, row[name]) for name in GPU_COLUMNS))
    return "\n".join(lines) + "\n"


def cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "time":
        return f"{value:.3f}"
    return f"0x{int(value):016x}" if name == "reasons" else f"{value:g}" if isinstance(value, float) else str(value)


KNOBS = {
    "utilization": "util", "memory_utilization": "mem_util", "power": "power_w", "power_limit": "power_limit_w",
    "sm_clock": "sm_mhz", "sm_clock_max": "sm_max_mhz", "memory_clock": "mem_mhz", "memory_clock_max": "mem_max_mhz",
    "reasons": "reasons", "pcie_rx": "pcie_rx_mb_s", "pcie_tx": "pcie_tx_mb_s", "pcie_gen": "pcie_gen",
    "pcie_width": "pcie_width", "temperature": "temp_c",
}  # fmt: skip


def nvml(script: Script, gpu: int, faster: float = 1.0) -> str:
    """As a script of the simulated NVML, for one of its GPUs; ranges by their middle."""
    lines = []
    at = 0.0
    for segment in script.segments:
        shown = {**script.data["common"], **segment, **segment.get("gpus", {}).get(str(gpu), {})}
        values = {name: shown[name] for name in KNOBS if shown.get(name) is not None}
        middle = {name: sum(value) / 2 if isinstance(value, list) else value for name, value in values.items()}
        lines.append(f"{at:g} " + " ".join(f"{KNOBS[name]}={value:.0f}" for name, value in middle.items()))
        at += segment["seconds"] / faster
    return "\n".join(lines) + "\n"
