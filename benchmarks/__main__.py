"""make bench, or: python -m benchmarks [startup | fleet | swap_downtime] [--hosts 1,10] [--repeat N]

Boots hosts of its own and needs root, as the lab does. Prints each result and keeps it under benchmarks/results/.
"""

from __future__ import annotations

import argparse

from benchmarks import fleet, startup, swap_downtime

HOSTS = (1, 10, 50, 100)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="startup, fleet, swap_downtime; default: all")
    parser.add_argument("--hosts", type=lambda text: tuple(map(int, text.split(","))), default=HOSTS)
    parser.add_argument("--repeat", type=int, help="measurements of each (startup 15, fleet 3, swap_downtime 7)")
    asked = parser.parse_args()
    if unknown := set(asked.names) - {"startup", "fleet", "swap_downtime"}:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    names = asked.names or ["startup", "fleet", "swap_downtime"]
    if "startup" in names:
        startup.measure_startup(asked.repeat or 15)
    if "fleet" in names:
        fleet.measure_fleet(asked.hosts, asked.repeat or 3)
    if "swap_downtime" in names:
        swap_downtime.measure_downtime(asked.repeat or 7)


if __name__ == "__main__":
    main()
