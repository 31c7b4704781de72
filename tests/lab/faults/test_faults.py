"""What a server, a host and other people can do to a swap: who answers afterwards, what is said, what is remembered.

Each host has one fault, and one pyinfra command swaps them all; then the same command is given once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from fleet import FILES, Choice, Fleet, Seen
from labhost import Host

pytestmark = [pytest.mark.lab, pytest.mark.xdist_group("faults")]

GPU = "/run/nvml-sim/gpu0"
LINGER = f"mkdir -p {GPU} && echo 20000 >{GPU}/linger_mib"


def at(step: str, command: str) -> str:
    """A shell line that runs a command on the host by the time that a swap is at this step."""
    wait = f"until grep -qs 'step.:.{step}' /var/lib/kernelswap/main/journal.json; do sleep 0.02; done"
    return f"systemd-run -q --collect --unit=fault sh -c '{wait}; {command}'"


THIEF = f"systemd-run -q --collect --unit=fault /usr/bin/python3 {FILES}/thief.py"
STRAY = "python3 -m sglang.launch_server --model-path /srv/models/tiny --port 30001"
LOOP = "systemd-run -q --unit=fault --setenv=PYTHONPATH=/opt/standin --setenv=NVML_SIM_HOLD_MIB=100 "
LOOP += f"sh -c 'while sleep 0.1; do {STRAY}; done'"
DROP_IN = "/etc/systemd/system/sglang-main.service.d"


def drop_in(fault: str) -> str:
    """Whatever release runs has this fault from now on."""
    return f"mkdir -p {DROP_IN} && printf '[Service]\\nEnvironment=STANDIN_FAULT={fault}\\n' >{DROP_IN}/fault.conf"


@dataclass(frozen=True)
class Fault:
    """A fault and what comes of it.

    profile: asked for; served: what the host serves before; prepare: done there before; repair: done there after.
    end: the swap's outcome; "" if no swap begins. step, says: where it fails and what is said. answers: which release
    answers right from outside afterwards: the old one, the new one, or none. again: what the same command says then.
    """

    name: str
    profile: str
    end: str
    step: str
    says: tuple[str, ...]
    again: str
    answers: str = "old"
    served: str = "triton"
    prepare: str = ""
    repair: str = ""


KERNEL = "no kernel image is available for execution on the device"
BARRED = "is barred: swap "
FAULTS = (
    Fault("crash at load", "crash-at-load", "rolled-back", "ready", (KERNEL, "install a build"), BARRED),
    Fault("exit 0 on a crash", "exit-0-at-load", "rolled-back", "ready", (KERNEL,), BARRED),
    Fault("crash after ready", "crash-after-ready", "rolled-back", "smoke", (KERNEL,), BARRED),
    Fault("crash during throughput", "crash-during-throughput", "rolled-back", "throughput", (KERNEL,), BARRED),
    Fault("never generates", "never-generates", "rolled-back", "ready", ("not ready within 3 s", "a token"), BARRED),
    Fault("never listens", "hangs-on-start", "rolled-back", "ready", ("a listener on port 30000",), BARRED),
    Fault("answers garbage", "garbage", "rolled-back", "smoke", ("expected /\\b4\\b/, got",), BARRED),
    Fault("NaN", "nan", "rolled-back", "smoke", ("64 of 64 logprobs are not finite",), BARRED),
    Fault("hangs after a while", "hangs-after", "rolled-back", "soak", ("POST /generate: timed out",), BARRED),
    Fault("too slow", "slow-answer", "rolled-back", "throughput", ("the floor is 1000",), BARRED),
    Fault("slower than before", "slower", "rolled-back", "throughput", ("slower than triton-", "50% slower"), BARRED),
    Fault(
        "an unknown choice", "unknown-choice", "refused", "preflight", ("invalid choice: 'tritn'",), "invalid choice"
    ),
    Fault("the old one hangs on stop", "cutlass", "committed", "", (), "unchanged", "new", served="hangs-on-stop"),
    Fault(
        "a foreign process on the port",
        "cutlass",
        "refused",
        "preflight",
        ("port 30000 is taken by pid ", "http.server", "end-foreign"),
        "committed cutlass-",
        "",
        prepare="systemctl stop sglang-main && systemd-run -q --unit=foreign python3 -m http.server 30000 && sleep 1",
        repair="systemctl is-active foreign && systemctl stop foreign",
    ),
    Fault(
        "memory lingers for a while",
        "cutlass",
        "committed",
        "",
        (),
        "unchanged",
        "new",
        prepare=f"{LINGER} && {at('clean', f'sleep 3; rm {GPU}/linger_mib')}",
    ),
    Fault(
        "memory lingers",
        "cutlass",
        "down",
        "clean",
        ("the host is not clean: GPU 0 GPU-", "20004 MiB used, idle is at most", "DOWN after"),
        "committed cutlass-",
        "",
        prepare=LINGER,
        repair=f"rm {GPU}/linger_mib",
    ),
    Fault(
        "everything crashes",
        "cutlass",
        "down",
        "ready",
        ("DOWN after", "rolling back to triton-", KERNEL),
        BARRED,
        "",
        prepare=drop_in("crash-at-load"),
        repair=f"rm -r {DROP_IN} && systemctl daemon-reload",
    ),
    Fault(
        "everything answers garbage",
        "cutlass",
        "down",
        "smoke",
        ("DOWN after", "runs again, but it failed its checks", "expected /\\b4\\b/"),
        BARRED,
        "",
        prepare=drop_in("garbage"),
        repair=f"rm -r {DROP_IN} && systemctl daemon-reload && systemctl restart sglang-main",
    ),
    Fault(
        "the disk is full",
        "cutlass",
        "",
        "",
        ("No space left on device", "could not write /etc/kernelswap/main/releases/cutlass-"),
        "committed cutlass-",
        prepare="dd if=/dev/zero of=/var/fill bs=64k status=none; true",
        repair="rm /var/fill",
    ),
    Fault(
        "the port is stolen for a while",
        "cutlass",
        "rolled-back",
        "ready",
        ("port 30000 is held by pid ", "thief.py"),
        "committed cutlass-",
        prepare=f"{THIEF} 3 start",
    ),
    Fault(
        "the port is stolen before the start",
        "cutlass",
        "down",
        "ready",
        ("DOWN after", "port 30000 is listened on by pid ", "thief.py"),
        "committed cutlass-",
        "",
        prepare=f"{THIEF} 600 start",
        repair="systemctl stop fault",
    ),
    Fault(
        "an old process keeps the port",
        "cutlass",
        "down",
        "clean",
        ("the host is not clean", "port 30000 is listened on by pid ", "thief.py"),
        "committed cutlass-",
        "",
        prepare=f"{THIEF} 600 stop",
        repair="systemctl stop fault",
    ),
    Fault(
        "a GPU is missing",
        "cutlass",
        "",
        "",
        ("no GPU 0 on this host",),
        "committed cutlass-",
        "old",
        prepare="mkdir -p /run/nvml-sim; echo 0 >/run/nvml-sim/gpus",
        repair="rm /run/nvml-sim/gpus",
    ),
    Fault(
        "a unit beside restarts itself",
        "cutlass",
        "committed",
        "",
        (),
        "unchanged",
        "new",
        prepare=f"cp {FILES}/beside.service /etc/systemd/system/ && systemctl enable -q --now beside && sleep 1",
        repair="! test -L /etc/systemd/system/multi-user.target.wants/beside.service",
    ),
    Fault(
        "a stray is started again and again",
        "cutlass",
        "refused",
        "preflight",
        ("SGLang runs outside any unit: pid ", "take it over with --adopt"),
        "committed cutlass-",
        "",
        prepare=f"{LOOP} && sleep 1",
        repair="systemctl stop fault",
    ),
    Fault(
        "the unit is masked",
        "cutlass",
        "refused",
        "preflight",
        ("sglang-main.service is masked", "ask who, then remove that link"),
        "committed cutlass-",
        "",
        prepare="ln -sf /dev/null /etc/systemd/system/sglang-main.service",
        repair="rm /etc/systemd/system/sglang-main.service && systemctl daemon-reload",
    ),
    Fault(
        "the model is gone",
        "cutlass",
        "refused",
        "preflight",
        ("user sglang: /srv/models/tiny: no such folder", "correct the path"),
        "committed cutlass-",
        prepare="mv /srv/models/tiny /srv/models/away",
        repair="mv /srv/models/away /srv/models/tiny",
    ),
    Fault(
        "the known-good is broken",
        "cutlass",
        "refused",
        "preflight",
        ("the known-good triton-", "cannot be brought back, its plan cannot be read"),
        "committed cutlass-",
        "",
        prepare="cd /etc/kernelswap/main/known-good && cp plan.json /root/plan.json && echo broken >plan.json",
        repair="cp /root/plan.json /etc/kernelswap/main/known-good/",
    ),
    Fault(
        "/etc is read-only",
        "cutlass",
        "",
        "",
        ("Read-only file system",),
        "committed cutlass-",
        prepare="mount --bind /etc /etc && mount -o remount,bind,ro /etc",
        repair="umount /etc",
    ),
    Fault(
        "the known-good dies while it is measured",
        "measured-cutlass",
        "committed",
        "",
        ("not measured, so the candidate is compared with what is stored of it",),
        "unchanged",
        "new",
        prepare=at("baseline", "systemctl kill -s KILL sglang-main.service"),
    ),
    Fault(
        "the network is gone for a while",
        "cutlass",
        "committed",
        "",
        (),
        "unchanged",
        "new",
        prepare=at("start", "ip link set eth0 down; sleep 5; ip link set eth0 up"),
    ),
    Fault(
        "a drop-in keeps every server from starting",
        "cutlass",
        "down",
        "ready",
        ("DOWN after", "the server ended while starting"),
        "",
        "",
        prepare=f"mkdir -p {DROP_IN} && printf '[Unit]\\nConditionPathExists=/nowhere\\n' >{DROP_IN}/fault.conf",
        repair=f"rm -r {DROP_IN} && systemctl daemon-reload",
    ),
)


@dataclass(frozen=True)
class Story:
    """One host's: before, what the command said, what was there afterwards, and what the same command said again."""

    before: Seen
    said: str
    after: Seen
    again: str

    @property
    def report(self) -> dict[str, Any]:
        old, new = self.before.state["history"], self.after.state["history"]
        assert len(new) == len(old) + 1
        return dict(new[-1])


@pytest.fixture(scope="module")
def hosts(fleet: Fleet) -> dict[str, Host]:
    assert len(FAULTS) <= len(fleet.lab.hosts), "see HOSTS in conftest.py"
    return dict(zip([fault.name for fault in FAULTS], fleet.lab.hosts, strict=False))


@pytest.fixture(scope="module")
def stories(fleet: Fleet, hosts: Mapping[str, Host]) -> dict[str, Story]:
    faults = {hosts[fault.name].name: fault for fault in FAULTS}
    assert fleet.deploy({name: Choice(fault.served) for name, fault in faults.items()}).code == 0
    before = fleet.each(hosts.values(), fleet.look)
    fleet.each(hosts.values(), lambda host: host.run(faults[host.name].prepare or "true"))
    choices = {name: Choice(fault.profile) for name, fault in faults.items()}
    said = fleet.deploy(choices)
    assert said.code == 1
    after = fleet.each(hosts.values(), fleet.look)
    fleet.each(hosts.values(), lambda host: host.run(faults[host.name].repair or "true"))
    again = fleet.deploy(choices)
    assert again.code == 1
    return {
        name: Story(before[host.name], said.lines[host.name], after[host.name], again.lines[host.name])
        for name, host in hosts.items()
    }


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault(fault: Fault, stories: Mapping[str, Story], record_property: Callable[[str, object], None]) -> None:
    story = stories[fault.name]
    old = story.before.state["known_good"]
    for words in fault.says:
        assert words in story.said
    if fault.end:
        report = story.report
        assert report["outcome"] == fault.end, story.said
        assert [step["name"] for step in report["steps"] if not step["ok"]][:1] == ([fault.step] if fault.step else [])
        new = report["request"]["release"]
        assert story.after.state["known_good"] == (new if fault.end == "committed" else old)
        if fault.answers:
            assert report["serving"] == (new if fault.answers == "new" else old)
    else:
        assert story.after.state["history"] == story.before.state["history"]
    if fault.answers:
        assert story.after.serving == (new if fault.answers == "new" else old)
    assert fault.again in story.again
    record_property("fault", (fault.name, fault.step, fault.end or "not begun", story.after.who_answers(old)))


@pytest.mark.parametrize(
    ("fault", "step", "least", "most"),
    [
        ("the old one hangs on stop", "stop", 3, 12),  # its limit is 3
        ("memory lingers for a while", "clean", 2, 8),
        ("memory lingers", "clean", 8, 16),
        ("never generates", "ready", 3, 12),
        ("never listens", "ready", 3, 12),
    ],
)
def test_limits_are_kept(fault: str, step: str, least: float, most: float, stories: Mapping[str, Story]) -> None:
    (seconds,) = (item["seconds"] for item in stories[fault].report["steps"] if item["name"] == step)
    assert least <= seconds < most


def test_a_known_good_that_answers_is_left_running(stories: Mapping[str, Story]) -> None:
    after = stories["everything answers garbage"].after
    assert after.backend == "triton"
    assert after.answer == "The of and the of and."
    assert after.state["unit"]["IPAddressDeny"] == ""


def test_a_barred_release_runs_with_force(
    fleet: Fleet, hosts: Mapping[str, Host], stories: Mapping[str, Story]
) -> None:
    host = hosts["crash at load"]
    before = fleet.look(host)
    forced = fleet.deploy({host.name: Choice("crash-at-load")}, "--force")
    assert forced.code == 1
    assert "ROLLED BACK" in forced.output
    after = fleet.look(host)
    assert len(after.state["history"]) == len(before.state["history"]) + 1
    assert after.serving == before.serving


def test_a_disk_that_fills_up_during_a_swap(
    fleet: Fleet,
    hosts: Mapping[str, Host],
    stories: Mapping[str, Story],
    record_property: Callable[[str, object], None],
) -> None:
    host = hosts["too slow"]
    before = fleet.look(host)
    fleet.arm(host, "ready", back=False)
    process = fleet.start({host.name: Choice("cutlass")})
    fleet.wait_sprung([host], process, timeout=60)
    host.run("dd if=/dev/zero of=/var/fill bs=64k; dd if=/dev/zero of=/var/fill2 bs=1 count=65536; true")
    fleet.release_trap(host)
    said = process.wait()
    for words in ("ROLLED BACK", "step smoke", "cannot write the journal: No space left on device", "free the disk"):
        assert words in said.output
    full = fleet.look(host)
    assert full.serving == before.serving
    assert full.state["history"][-1]["outcome"] == "rolled-back"
    host.run("rm /var/fill*")
    assert fleet.deploy({host.name: Choice("cutlass")}).code == 0
    assert str(fleet.look(host).serving).startswith("cutlass-")
    end = ("the disk fills up during the swap", "smoke", "rolled-back", full.who_answers(before.state["known_good"]))
    record_property("fault", end)


def test_two_swaps_at_once(fleet: Fleet, hosts: Mapping[str, Host], stories: Mapping[str, Story]) -> None:
    """The first is held at its smoke test, so the others certainly come while it runs."""
    host = hosts["answers garbage"]
    before = fleet.look(host)
    fleet.arm(host, "smoke", back=False)
    first = fleet.start({host.name: Choice("cutlass")}, "--reason", "faster")
    fleet.wait_sprung([host], first, timeout=60)
    other = fleet.deploy({host.name: Choice("nan")})
    assert other.code == 1
    for words in ("another swap is running: converge to cutlass-", " by ", " since ", "at smoke"):
        assert words in other.output
    second = fleet.start({host.name: Choice("cutlass")})
    fleet.wait_for(second, "already running: converge to cutlass-")
    fleet.release_trap(host)
    ends = [process.wait() for process in (first, second)]
    assert [end.code for end in ends] == [0, 0]
    assert all("committed cutlass-" in end.output for end in ends)
    after = fleet.look(host)
    assert len(after.state["history"]) == len(before.state["history"]) + 1
    assert str(after.serving).startswith("cutlass-")


@pytest.mark.parametrize("profile", ["cutlass", "triton"])
def test_two_that_start_in_the_same_moment(
    profile: str, fleet: Fleet, hosts: Mapping[str, Host], stories: Mapping[str, Story]
) -> None:
    """Both decide before either has begun: the agent settles it."""
    host = hosts["NaN"]
    marks = {"TRY": profile}  # a release of its own for each case
    before = fleet.look(host)
    choices = [Choice("cutlass", marks), Choice(profile, marks)]
    ends = [process.wait() for process in [fleet.start({host.name: choice}) for choice in choices]]
    after = fleet.look(host)
    assert str(after.serving).split("-")[0] in ("cutlass", profile)
    if profile == "cutlass":
        assert [end.code for end in ends] == [0, 0]
        assert len(after.state["history"]) == len(before.state["history"]) + 1
    else:  # one may also begin when the other is over
        assert sum(end.code == 0 for end in ends) == len(after.state["history"]) - len(before.state["history"])
        assert all(
            end.code == 0 or "REFUSED, nothing was touched" in end.output or "refused" in end.output for end in ends
        )
