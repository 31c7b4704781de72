"""Whatever dies, and at whatever step of a swap: the host ends alone on a verified release, and its story is told.

Each host stands for one moment, and one pyinfra command swaps them all. On each the agent is stopped at its moment
(trap.py); then pyinfra is killed, or the agent, or the SSH connection, or the host's power is cut. The whole is looked
at from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from fleet import TRAP, Choice, Fleet, Seen
from labhost import Host

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("faults")]

# The host goes on by itself where it lost only its controller: that is looked at in `make test-faults` alone.
KINDS = (
    pytest.param("controller", marks=pytest.mark.exhaustive),
    pytest.param("connection", marks=pytest.mark.exhaustive),
    "agent",
    pytest.param("power", marks=pytest.mark.exhaustive),
)
LAST = "power"


@dataclass(frozen=True)
class Moment:
    """Where a swap is interrupted: at the beginning of a step, or there before a call (see trap.py).

    end: how the swap then ends where it cannot go on.
    """

    name: str
    step: str
    end: str
    back: bool = False
    event: str = ""
    text: str = ""


MOMENTS = (
    *(Moment(step, step, "refused") for step in ("preflight", "drain", "baseline", "activate")),
    *(
        Moment(step, step, "rolled-back")
        for step in ("stop", "clean", "start", "ready", "smoke", "drift", "throughput", "open", "commit")
    ),
    Moment("activate: unit written", "activate", "refused", False, "os.rename", "system.control/sglang-main.service"),
    Moment("stop: it stops, unit not loaded", "stop", "rolled-back", False, "subprocess.Popen", "daemon-reload"),
    Moment("start: shut off, not started", "start", "rolled-back", False, "subprocess.Popen", "'start'"),
    # The point of no return is the rename of the unit into /etc.
    Moment("commit: before the rename", "commit", "rolled-back", False, "os.rename", "/etc/systemd/system/sglang-main"),
    Moment("commit: after the rename", "commit", "committed", False, "os.rename", "known-good"),
    Moment("commit: candidate still there", "commit", "committed", False, "shutil.rmtree", "system.control"),
    Moment("commit: history written, journal open", "commit", "committed", False, "os.remove", "journal.json"),
    *(Moment(f"< {step}", step, "rolled-back", True) for step in ("stop", "clean", "start", "ready", "smoke", "open")),
    Moment("< open: history written, journal open", "open", "rolled-back", True, "os.remove", "journal.json"),
)
OTHER = {"triton": Choice("cutlass"), "cutlass": Choice("triton")}
MEASURED = {"triton": Choice("measured-cutlass"), "cutlass": Choice("measured-triton")}
DEATH = {"agent": "the agent died during the step ", "power": "the host rebooted during the step "}


@dataclass(frozen=True)
class Story:
    """One host's: before, what the command said, what was there afterwards, and what the next command said."""

    before: Seen
    said: str
    after: Seen
    next: str

    @property
    def report(self) -> dict[str, Any]:
        """The one line that the swap left in the history."""
        old, new = self.before.state["history"], self.after.state["history"]
        assert new[: len(old)] == old
        assert len(new) == len(old) + 1, [report["request"]["swap"] for report in new[len(old) :]]
        return dict(new[-1])


@pytest.fixture(scope="module")
def hosts(fleet: Fleet) -> dict[str, Host]:
    """A host for each moment, all of them serving the same."""
    found = dict(zip([moment.name for moment in MOMENTS], fleet.lab.hosts, strict=False))
    assert fleet.deploy({host.name: Choice("triton") for host in found.values()}).code == 0
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stories(fleet: Fleet, hosts: Mapping[str, Host], kind: str) -> dict[str, Story]:
    """All moments at once, and then the same command once more."""
    garbage = Choice("garbage", {"TRY": kind})  # a release of its own each time, as a failed one is barred
    moments = {hosts[moment.name].name: moment for moment in MOMENTS}
    before: dict[str, Seen] = fleet.each(hosts.values(), fleet.look)

    def choice(name: str, backend: str) -> Choice:
        measured = moments[name].step == "baseline"
        return garbage if moments[name].back else (MEASURED if measured else OTHER)[backend]

    choices = {name: choice(name, seen.backend) for name, seen in before.items()}
    fleet.each(hosts.values(), lambda host: arm(fleet, host, moments[host.name]))
    said = interrupt(fleet, kind, list(hosts.values()), choices)
    after = fleet.each(hosts.values(), fleet.look)
    # The last kind's is carried out, to show that the hosts are as good as new; it would only cost time for the others.
    again = fleet.deploy(choices, *(() if kind == LAST else ("--dry",)))
    return {
        name: Story(before[host.name], said.get(host.name, ""), after[host.name], again.lines[host.name])
        for name, host in hosts.items()
    }


def arm(fleet: Fleet, host: Host, moment: Moment) -> None:
    fleet.arm(host, moment.step, moment.back, moment.event, moment.text)


def interrupt(fleet: Fleet, kind: str, hosts: list[Host], choices: Mapping[str, Choice]) -> Mapping[str, str]:
    """Swap, interrupt when all hosts are at their moment, and wait for the end. Returns what was said of each host."""
    process = fleet.start(choices)
    fleet.wait_sprung(hosts, process, timeout=180)
    if kind == "controller":
        process.kill()
        fleet.each(hosts, fleet.release_trap)
    elif kind == "connection":
        fleet.each(hosts, fleet.drop_connection)
        process.wait()
        fleet.each(hosts, fleet.release_trap)
    elif kind == "agent":
        fleet.each(hosts, lambda host: host.run(f"kill -KILL $(cut -d' ' -f1 {TRAP}/sprung)"))
    else:
        fleet.cut_power(hosts)
    fleet.settle(hosts)
    if kind == "controller":
        return {}
    run = process.wait()
    assert run.code == 1
    return run.lines


@pytest.mark.parametrize("moment", MOMENTS, ids=[moment.name for moment in MOMENTS])
def test_the_host_ends_alone_on_a_verified_release(
    moment: Moment, kind: str, stories: Mapping[str, Story], record_property: Callable[[str, object], None]
) -> None:
    story = stories[moment.name]
    report = story.report
    end = moment.end
    if kind in ("controller", "connection"):  # the host does not need them
        end = "rolled-back" if moment.back else "committed"
    assert report["outcome"] == end, report
    new, old = report["request"]["release"], story.before.state["known_good"]
    assert new != old
    assert story.after.serving == (new if end == "committed" else old)
    assert report["serving"] == story.after.serving
    record_property("kill", (moment.name, kind, end))


@pytest.mark.parametrize("moment", MOMENTS, ids=[moment.name for moment in MOMENTS])
def test_its_story_is_told(moment: Moment, kind: str, stories: Mapping[str, Story]) -> None:
    story, report = stories[moment.name], stories[moment.name].report
    swap, end = report["request"]["swap"], report["outcome"]
    if kind in DEATH and end != "committed":
        cause = report["cause"]["what"]
        assert cause == f"{DEATH[kind]}{moment.step}" if not moment.back else "answer" in cause, cause
    if kind == "agent":
        assert {"refused": "REFUSED", "rolled-back": "ROLLED BACK", "committed": "committed "}[end] in story.said
    if kind in ("power", "connection"):
        assert "the swap goes on on the host; run the same command again to follow it" in story.said
    assert swap in story.next
    assert end in story.next


@pytest.mark.parametrize("moment", MOMENTS, ids=[moment.name for moment in MOMENTS])
def test_a_reboot_never_starts_the_candidate(moment: Moment, kind: str, stories: Mapping[str, Story]) -> None:
    if kind != "power":
        pytest.skip("no reboot")
    story = stories[moment.name]
    assert story.after.state["boot"] != story.before.state["boot"]
    assert len(story.after.state["starts"]) == 1
    assert f"moe_runner_backend='{story.after.backend}'" in story.after.state["starts"][0]
    assert story.after.state["failed"] == ""
