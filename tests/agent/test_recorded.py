"""Recorded /proc trees with strays and innocents: whose each process is. A case is a file under proc/.

A process is `pid`, `parent`, `argv`, `cgroup` (the v2 path; `raw_cgroup`: the whole file), and what else matters of
`comm`, `exe`, `uid` (1000), `state` (S), `threads`, `started` and `group` (its id), `env`, `fds`; `joined`: its command
line is a title, without ends of words; `missing`: files that are not there. `listening`: ports with their holders.
`minors`: what the driver says of its GPUs. `expect`: own, unit NAME, stray, user unit NAME, container RUNTIME ID,
foreign [NAME], other (SGLang, not this instance's), or innocent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import occupants, processes
from kernelswap.agent.occupants import Occupants
from kernelswap.protocol import Gpu, Plan

CASES = sorted((Path(__file__).parent / "proc").glob("*.json"))


def lay_out(case: dict[str, Any], proc: Path) -> None:
    """The case as a tree of files, as /proc has them; links are files with their target."""
    (proc / "net").mkdir()
    (proc / "stat").write_text("cpu 1 2 3\nbtime 1700000000\n")
    sockets: dict[int, list[str]] = {}
    rows = ["  sl  local_address rem_address   st ..."]
    for number, (port, *holders) in enumerate(case.get("listening", ())):
        rows.append(f"   {number}: 00000000:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {700 + number} 1 0 100 0 0 10 0")
        for pid in holders:
            sockets.setdefault(pid, []).append(f"socket:[{700 + number}]")
    (proc / "net/tcp").write_text("\n".join(rows) + "\n")
    for uuid, minor in case.get("minors", {}).items():
        folder = proc / f"driver/nvidia/gpus/0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t RTX\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    for row in case["processes"]:
        lay_out_process(row, sockets.get(row["pid"], []), proc / str(row["pid"]))


def lay_out_process(row: dict[str, Any], sockets: list[str], folder: Path) -> None:
    argv, comm = row["argv"], row.get("comm") or (row["argv"] or ["-"])[0].rpartition("/")[2][:15]
    numbers = [
        row["parent"],
        row.get("group", row["pid"]),
        row.get("session", 0),
        *[0] * 13,
        row.get("threads", 1),
        0,
        row.get("started", row["pid"]),
        0,
        0,
    ]
    stat = f"{row['pid']} ({comm}) {row.get('state', 'S')} {' '.join(map(str, numbers))}"
    uid = row.get("uid", 1000)
    texts = {
        "stat": stat[:12] if row.get("torn") else stat,
        "comm": comm,
        "cmdline": " ".join(argv) if row.get("joined") else "".join(f"{word}\0" for word in argv),
        "cgroup": row["cgroup"] if row.get("raw_cgroup") else f"0::{row['cgroup']}\n",
        "status": f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        "exe": row.get("exe", ""),
        "environ": "".join(f"{name}={value}\0" for name, value in row.get("env", {}).items()),
    }
    (folder / "fd").mkdir(parents=True)
    for name, text in texts.items():
        if name not in row.get("missing", ()):
            (folder / name).write_text(text)
    for number, target in enumerate([*row.get("fds", ()), *sockets]):
        (folder / "fd" / str(number)).write_text(target)


def judge(case: dict[str, Any], proc: Path) -> Occupants:
    instance = case["instance"]
    plan = Plan(
        instance="main", release="r", profile="p", model="m", python="/p", argv=(), environment={}, user="sglang",
        model_path="/m", served_name="m", address="0.0.0.0", port=instance["port"], gpus=tuple(instance["gpus"]),
    )  # fmt: skip
    gpus = [Gpu(**{**row, "pids": tuple(row["pids"])}, capability="12.0", memory_total=97887) for row in case["gpus"]]
    return occupants.judge(proc, plan, set(case.get("others", ())), gpus, {})


def verdicts(proc: Path, found: Occupants) -> dict[int, str]:
    table = processes.table(proc)
    said = dict.fromkeys(table, "innocent")

    def say(text: str, heads: tuple[processes.Process, ...]) -> None:
        for pid in processes.descendants(table, [head.pid for head in heads]):
            said[pid] = text

    say("foreign", found.foreign)
    for unit, heads in found.foreign_units.items():
        say(f"foreign {unit}", heads)
    say("own", found.own)
    for unit, heads in found.units.items():
        say(f"unit {unit}", heads)
    say("other", found.bystanders)
    for head in found.strays:
        where = head.container
        contained = f"container {where.runtime} {where.id}" if where else ""
        say(contained or (f"user unit {head.user_unit}" if head.user_unit else "stray"), (head,))
    return said


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_whose_each_process_is(path: Path, tmp_path: Path) -> None:
    case = {"gpus": [], **json.loads(path.read_text())}
    lay_out(case, tmp_path)
    found = judge(case, tmp_path)
    said = verdicts(tmp_path, found)
    expected = {int(pid): verdict for pid, verdict in case["expect"].items()}
    assert {pid: said.get(pid) for pid in expected} == expected
    assert [watcher.pid for watcher in found.watchers] == case.get("watchers", [])
    assert processes.zombies(processes.table(tmp_path)) == case.get("zombies", [])


def test_there_are_cases() -> None:
    assert len(CASES) >= 18
