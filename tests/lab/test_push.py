"""A push in waves by the literal command, as the hosts themselves tell it: what they serve, and their history."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import Project, Run

pytestmark = pytest.mark.xdist_group("rollout")

# The new release runs an engine of its own, which can be broken on one host alone.
NEW = "environment: {PYTHONPATH: /opt/new}"
GOOD = "rm -rf /opt/new; ln -s /opt/standin /opt/new"
BAD = 'rm -rf /opt/new; cp -r /opt/standin /opt/new; sed -i \'s/^FAULT, .*/FAULT, AMOUNT = "crash-at-load", ""/\' '
BAD += "/opt/new/sglang/launch_server.py"


@dataclass(frozen=True)
class Seen:
    """A host from inside. ends: of its swaps, oldest first."""

    profile: str
    pid: str
    ends: Sequence[str]


def look(host: Host) -> Seen:
    said = host.output(
        "basename $(readlink /etc/kernelswap/main/known-good); systemctl show -P MainPID sglang-main; "
        "cat /var/lib/kernelswap/main/history.jsonl"
    )
    release, pid, *history = said.splitlines()
    assert host.output("test -e /var/lib/kernelswap/main/journal.json || echo closed") == "closed"
    reports = [json.loads(line) for line in history]
    ends = [f"{report['outcome']} {report['request']['release'].split('-')[0]}" for report in reports]
    return Seen(release.split("-")[0], pid, ends)


def each(hosts: Sequence[Host], work: Callable[[Host], Any]) -> dict[str, Any]:
    with ThreadPoolExecutor(8) as pool:
        return dict(zip([host.name for host in hosts], pool.map(work, hosts), strict=True))


def touched(before: Mapping[str, Seen], after: Mapping[str, Seen]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def retry(run: Run) -> list[str]:
    """The command that was printed, without what Project.deploy says itself."""
    (line,) = re.findall(r"to go on: pyinfra inventory/hosts.py deploy.py (.*)$", run.output, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize(
    ("count", "waves", "how"),
    [
        pytest.param(6, [1, 2, "100%"], (), id="6 hosts"),
        *(
            pytest.param(20, [1, 3, "50%"], how, id=" ".join(("20 hosts", *how)), marks=pytest.mark.exhaustive)
            for how in ((), ("--parallel", "2"), ("--serial",))
        ),
    ],
)
def test_a_push(lab: Lab, tmp_path: Path, count: int, waves: list[Any], how: Sequence[str]) -> None:
    there = len(lab.hosts)
    hosts = lab.up(there + count)[there:]
    names = [host.name for host in hosts]
    revert = f"rollout={json.dumps({'waves': waves, 'on_stop': 'revert'})}"
    project = Project(tmp_path, [(host, {"rollout": {"waves": waves}}) for host in hosts]).write()
    project.profile("new", NEW)
    each(hosts, lambda host: host.run(GOOD))
    assert project.deploy("-y", "--data", 'rollout={"waves": ["100%"]}').code == 0
    start = each(hosts, look)
    assert {(seen.profile, *seen.ends) for seen in start.values()} == {("plain", "committed plain")}

    # The canary fails: it alone was touched.
    hosts[0].run(BAD)
    first = project.deploy("--profile", "new", "-y", *how)
    assert first.code == 1
    after = each(hosts, look)
    assert touched(start, after) == names[:1]
    assert (after[names[0]].profile, after[names[0]].ends[-1]) == ("plain", "rolled-back new")

    # The others go on as printed, and one of the second wave fails: those that were committed go back.
    hosts[2].run(BAD)
    second = project.deploy(*retry(first), "--data", revert)
    assert second.code == 1
    back = each(hosts, look)
    fourth = 2 + waves[1]  # the first host of the third wave; the canary is not among them
    assert names[2] in touched(after, back)
    assert set(touched(after, back)) <= set(names[1:fourth])
    assert {seen.profile for seen in back.values()} == {"plain"}
    assert back[names[1]].ends[-2:] == ["committed new", "committed plain"]
    assert back[names[2]].ends[-1] == "rolled-back new"

    # All but those that failed, as printed.
    each([hosts[0], hosts[2]], lambda host: host.run(GOOD))
    assert project.deploy(*retry(second)).code == 0
    rest = each(hosts, look)
    assert touched(back, rest) == [name for name in names if name not in (names[0], names[2])]
    assert {rest[name].profile for name in touched(back, rest)} == {"new"}
    assert project.deploy("--profile", "new", "-y", *how).code == 1  # it is barred on two
    assert each(hosts, look) == rest

    # Another rollout makes no other server.
    again = project.deploy(*retry(second), "--data", 'rollout={"waves": [2], "pause": 9}')
    assert again.code == 0
    assert "Starting operation" not in again
    assert each(hosts, look) == rest

    if count > 6:
        assert project.deploy("--profile", "new", "--force", "-y", *how).code == 0
        assert {seen.profile for seen in each(hosts, look).values()} == {"new"}
