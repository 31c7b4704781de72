"""How long `kernelswap --help` takes, and what our import adds to pyinfra's."""

from __future__ import annotations

import sys

from benchmarks import measure

# As pyinfra's command does before it reads deploy.py, which imports the rest.
PYINFRA = """
from gevent import monkey
monkey.patch_all()
import pyinfra_cli.main, pyinfra.operations.server, pyinfra.operations.systemd, time
start = time.perf_counter()
import kernelswap.planning, kernelswap.router_planning, roles.host, roles.monitoring, roles.router, roles.server
print(time.perf_counter() - start)
"""


def measure_import() -> float:
    """Seconds."""
    return float(measure.run([sys.executable, "-c", PYINFRA], measure.ROOT).output)


def measure_help() -> float:
    return measure.run([str(measure.BIN / "kernelswap"), "--help"], measure.ROOT).wall


def measure_startup(repeat: int) -> None:
    on = measure.machine()
    measure_help(), measure_import()  # so that the bytecode is there
    times = {"help_s": [], "import_s": []}
    for _ in range(repeat):
        times["help_s"].append(measure_help())
        times["import_s"].append(measure_import())
    found = {name: measure.spread(values) for name, values in times.items()}
    rows = [
        ("`kernelswap --help`", measure.shown(found["help_s"], 3), "0.150"),
        ("our import on top of pyinfra's", measure.shown(found["import_s"], 3), "0.100"),
    ]
    text = measure.table(("what", f"seconds, median of {repeat} (lowest to highest)", "at most"), rows)
    measure.keep("startup", "Start-up", {"machine": on, "repeat": repeat, **found}, text)
