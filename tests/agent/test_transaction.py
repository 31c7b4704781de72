"""How a swap that died in the middle is taken up again. The whole of it runs on real hosts, in tests/lab/faults."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router import FakeRouter
from systemd import PORT
from world import OLD, UNIT, Scenario, World, before

from kernelswap.agent import (
    clean,
    client,
    drain,
    engine,
    files,
    gpus,
    host,
    preflight,
    service,
    transaction,
    units,
    zero,
)
from kernelswap.agent.host import Folders, Journal
from kernelswap.agent.processes import Process
from kernelswap.agent.routers import Member
from kernelswap.agent.server import Failed
from kernelswap.agent.transaction import Transaction
from kernelswap.protocol import (
    AGENT_PATH,
    Cause,
    Drain,
    Gpu,
    HostFault,
    Plan,
    Request,
    Resolved,
    Router,
    StepResult,
    Traffic,
    decode,
    encode,
)

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
PLAN = Plan("main", "b-2", "b", "m", "/usr/bin/python3", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
RUNS = units.UnitStatus("active", "running", 7, "/run/x", True, "", "success", None)


@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("step", ["stop", "clean", "start", "ready", "smoke", "throughput", "open"])
def test_only_what_a_rollback_has_started_is_taken_for_the_known_good(
    step: str, back: bool, rebooted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders("main", tmp_path)
    (folders.release("b-2")).mkdir(parents=True)
    (folders.release("b-2") / "plan.json").write_text(encode(PLAN))
    cause = encode(Cause("the server ended", "log", "read it")) if back else ""
    journal = Journal(REQUEST, time.time(), "boot-1", step, touched=True, back=back, previous="a-1", cause=cause)
    monkeypatch.setattr(host, "boot_id", lambda: "boot-2" if rebooted else "boot-1")
    monkeypatch.setattr(units, "status", lambda _unit: RUNS)
    seen: dict[str, Any] = {}

    def remember(self: Transaction, cause: Cause, stop: bool = True, **_others: Any) -> None:
        seen.update(stop=stop, cause=cause.what, journal=self.journal)

    monkeypatch.setattr(Transaction, "_back", remember)
    transaction.recover(folders, journal)
    assert seen["stop"] == (not rebooted and not (back and step in ("ready", "smoke", "open")))
    assert seen["cause"] == (
        "the server ended" if back else f"the {'host rebooted' if rebooted else 'agent died'} during the step {step}"
    )
    death = f"the {'host rebooted' if rebooted else 'agent died'} during the step {step}"
    steps = (StepResult(f"< {step}" if back else step, 0, ok=False, detail=death),)
    assert seen["journal"] == dataclasses.replace(journal, back=True, cause=seen["journal"].cause, steps=steps)


WORLD = Scenario("over a known-good", "b-2", (), known_good="a-1")


def killed_at(step: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a swap until its agent dies at the beginning of a step."""

    def die() -> None:
        raise KeyboardInterrupt

    world.stage("b-2")
    files.write(world.folders.request, encode(REQUEST), mode=0o600)
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, f"_{step}", lambda *_others: die())
        with world.entered(monkeypatch), pytest.raises(KeyboardInterrupt):
            service.run("main", REQUEST.swap)


def test_the_report_after_a_death_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    killed_at("ready", world, monkeypatch)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
    assert [(step.name, step.ok) for step in world.reports[-1].steps] == [
        *((name, True) for name in ("preflight", "drain", "activate", "stop", "clean", "start")),
        ("ready", False),
        *((f"< {name}", True) for name in ("stop", "clean", "start", "ready", "smoke", "open")),
    ]


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_changes_nothing(jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    killed_at("ready", world, monkeypatch)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
        again = dataclasses.replace(REQUEST, swap="later")
        files.write(world.folders.request, encode(again))
        service.run("main", "later")
    first, second = world.reports[-2:]
    assert (first.outcome, second.outcome) == ("rolled-back", "committed")
    assert 0 <= first.ended - first.started < 600
    assert 0 <= second.ended - second.started < 600


def test_a_commit_that_cannot_be_finished_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /etc becomes read-only right after the unit got its name: forward is shut, and so is the way back."""
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    files.write(world.folders.request, encode(REQUEST), mode=0o600)

    def refuse(path: Path, _target: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(files, "link", refuse)
        service.run("main", REQUEST.swap)
    report = world.reports[-1]
    assert (report.outcome, report.serving, world.serving) == ("down", "b-2", {"b-2"})
    assert report.detail == "b-2 serves and was verified, but its commit could not be finished"
    assert report.cause
    assert "Read-only file system" in report.cause.what
    assert "make /etc writable" in report.cause.todo
    with world.entered(monkeypatch):
        files.write(world.folders.request, encode(dataclasses.replace(REQUEST, swap="later")))
        service.run("main", "later")
    assert world.reports[-1].outcome == "committed"


def test_one_unit_that_was_not_stopped_yet_is_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent died in the middle of stopping what it found: what still runs is no rest, but what comes back."""
    world = before(tmp_path, Scenario("zero", "b-2", (), hand_written=OLD))
    killed_at("stop", world, monkeypatch)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
    assert (world.reports[-1].outcome, world.serving) == ("rolled-back", {"zero"})


@pytest.mark.parametrize(
    ("where", "says"),
    [("unit", "sglang-main.service is gone or torn"), ("etc", "(Operation not permitted): see `lsattr -d ")],
)
def test_what_preflight_refuses(where: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    plan = dataclasses.replace(host.read_plan(world.folders, "b-2"), digests={world.folders.unit: "0" * 64})
    if where == "unit":
        files.write(world.folders.release("b-2") / "plan.json", encode(plan))
    real = files.why_unwritable
    monkeypatch.setattr(
        files, "why_unwritable", lambda path: "Operation not permitted" if where == path.parts[-3] else real(path)
    )
    files.write(world.folders.request, encode(REQUEST), mode=0o600)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
    report = world.reports[-1]
    assert (report.outcome, report.serving, world.serving) == ("refused", "a-1", {"a-1"})
    assert report.cause
    assert says in report.cause.what


def test_several_faults_are_told_each_by_itself_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    files.write(world.folders.release("b-2") / "secrets.yaml", 'api-key: "s3cret"\n', mode=0o600)
    faults = [HostFault("SGLang says s3cret", "take s3cret out"), HostFault("no disk", "free some")]
    with world.entered(monkeypatch) as patch:
        patch.setattr(preflight, "system", lambda: faults)
        several = transaction.perform(world.folders, REQUEST)
        faults = faults[:1]
        single = transaction.perform(world.folders, dataclasses.replace(REQUEST, swap="later"))
    assert several.cause
    assert several.cause.what == "SGLang says [redacted]: take [redacted] out; no disk: free some"
    assert several.cause.faults == (
        HostFault("SGLang says [redacted]", "take [redacted] out"),
        HostFault("no disk", "free some"),
    )
    assert (several.outcome, [step.detail for step in several.steps]) == ("refused", ["2 faults"])
    assert single.cause
    assert (single.cause.what, single.cause.todo) == ("SGLang says [redacted]", "take [redacted] out")
    assert single.cause.faults == ()
    assert world.reports[-2:] == [several, single]


def test_what_a_step_saw_is_told_and_kept_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    files.write(world.folders.release("b-2") / "secrets.yaml", 'api-key: "s3cret"\n', mode=0o600)
    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(transaction.smoke, "check", lambda *_: ("answered s3cret", {}))
        report = transaction.perform(world.folders, REQUEST)
    assert next(step for step in report.steps if step.name == "smoke").detail == "answered [redacted]"
    story = "".join(path.read_text() for path in world.folders.evidence(REQUEST.swap).iterdir())
    assert "answered [redacted]" in story
    assert "s3cret" not in story + world.folders.history.read_text()


def test_the_next_smoke_is_told_what_the_known_good_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    told = []

    def check(_plan: Plan, _client: Any, _since: float, known: float | None) -> tuple[str, dict[str, float]]:
        told.append(known)
        return "right", {"garbled": 0.25}

    for release in ("b-2", "c-3"):
        world.stage(release)
        with world.entered(monkeypatch), monkeypatch.context() as patch:
            patch.setattr(transaction.smoke, "check", check)
            request = dataclasses.replace(REQUEST, release=release, swap=f"swap-of-{release}")
            assert transaction.perform(world.folders, request).outcome == "committed"
    assert told == [None, 0.25]


def test_a_rollback_writes_texts_as_it_did_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    files.write(world.folders.measured("a-1") / "smoke.json", '{"garbled": 0.0}')
    files.write(world.folders.measured("b-2") / "smoke.json", '{"garbled": 0.75}')
    told = []

    def check(_plan: Plan, _client: Any, _since: float, known: float) -> tuple[str, dict[str, float]]:
        told.append(known)
        return "right", {"garbled": 0.75}

    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(transaction.smoke, "check", check)
        report = transaction.perform(world.folders, dataclasses.replace(REQUEST, action="rollback"))
    assert (report.outcome, told) == ("committed", [0.75])


def test_errors_of_a_gpu_count_since_the_start_of_the_server_that_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another agent had started it: those of the candidate before it are not the known-good's."""
    folders = Folders("main", tmp_path)
    transaction = Transaction(folders, Journal(REQUEST, time.time(), "boot-1", "smoke", back=True, previous="a-1"))
    monkeypatch.setattr(units, "status", lambda _unit: dataclasses.replace(RUNS, since=1234.5))
    assert transaction._since() == 1234.5
    transaction.started = host.uptime() - 60
    assert abs(transaction._since() - (time.time() - 60)) < 5


@pytest.mark.parametrize(("action", "against"), [("converge", "a-1"), ("rollback", "b-2")])
def test_a_rollback_is_compared_with_what_it_answered_itself(
    action: str, against: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    told = []

    def check(
        _plan: Plan, _client: Any, _folders: Folders, _evidence: Path, known: str
    ) -> tuple[str, dict[str, float]]:
        told.append(known)
        raise Failed(Cause("other answers", "here", "nothing", "drift", "release"), {"kl": 0.5})

    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(transaction.drift, "check", check)
        report = transaction.perform(world.folders, dataclasses.replace(REQUEST, action=action))
    assert told == [against]
    assert (report.outcome, report.failed_step) == ("rolled-back", "drift")
    assert next(step for step in report.steps if step.name == "drift").numbers == {"kl": 0.5}


def test_a_stray_that_ends_by_itself_is_told_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the note of what would bring it back."""
    world = before(tmp_path, Scenario("stray", "b-2", ()))
    world.stage("b-2")
    words = ("/usr/bin/python3", "-m", "sglang.launch_server", "--port", str(PORT))
    gone = Process(4194305, 1, 1, "S", 0, words, "/user.slice/user-0.slice/session-1.scope")  # above any pid_max
    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(transaction.processes, "table", lambda *_: {gone.pid: gone})
        patch.setattr(transaction.processes, "listeners", lambda *_: [])
        patch.setattr(transaction.processes, "changed_user", lambda _pid: False)
        patch.setattr(transaction.processes, "is_contained", lambda _pid: False)
        report = transaction.perform(world.folders, dataclasses.replace(REQUEST, adopt=True))
    assert (report.outcome, report.failed_step) == ("refused", "drain")
    assert report.cause
    assert report.cause.what.startswith("it ended while its place was noted: pid 4194305 of root")


def test_a_systemd_that_refuses_before_the_commit_point_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = before(tmp_path, Scenario("zero", "b-2", (), hand_written=OLD))
    world.stage("b-2")

    def refuse(_unit: str) -> None:
        raise units.UnitError("systemctl disable: no answer within 60 s")

    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(units, "disable", refuse)
        report = transaction.perform(world.folders, REQUEST)
    assert (report.outcome, report.failed_step, world.serving) == ("rolled-back", "commit", {"zero"})
    assert report.cause
    assert "systemctl disable: no answer within 60 s" in report.cause.what


def no_nvml(*_: object) -> tuple[Gpu, ...]:
    raise gpus.GpuError("NVML gives no answer within 60 s")


def test_a_driver_that_hangs_during_the_swap_bars_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, started = dataclasses.replace(PLAN, gpus=("GPU-a",)), time.time()
    monkeypatch.setattr(gpus, "read", no_nvml)
    cause = gpus.blamed(Cause("CUDA error", "log:7", "another backend", "cuda", "release"), plan, started)
    assert (cause.blame, cause.what) == ("host", "NVML gives no answer within 60 s; CUDA error")
    assert gpus.blamed(cause, plan, started) == cause, "not told twice"


def test_release_zero_is_found_back_without_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, Scenario("zero", "b-2", (), hand_written=OLD))
    plan = dataclasses.replace(PLAN, gpus=("GPU-a",))
    with world.entered(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(gpus, "read", no_nvml)
        there = host.ReleaseZero(units=(host.FoundUnit(OLD, enabled=True),))
        assert zero.wait_healthy(world.folders, plan, there) == "/health of 1 server(s)"


def test_what_was_foreseen_is_compared_with_what_the_server_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    values = {"page_size": "64", "moe_runner_backend": '"triton"', "random_seed": "1", "api_key": "null"}
    said = engine.Answer("0.5.23", resolved=True, values=values, warnings=("--disable-cuda-graph is deprecated",))
    served = {"page_size": 32, "moe_runner_backend": "triton", "random_seed": 2, "api_key": "k3y", "version": "0.5.24"}
    with world.entered(monkeypatch) as patch:
        patch.setattr(engine, "asked", lambda *_others: contextlib.nullcontext(lambda: said))
        patch.setattr(client.Client, "server_info", lambda _self: served)
        report = transaction.perform(world.folders, REQUEST)
    assert report.outcome == "committed"
    assert report.notes == (
        "SGLang warns: --disable-cuda-graph is deprecated",
        "the server runs with page_size 32, the preflight had foreseen 64",
    )
    events = files.read_lines(world.folders.evidence(REQUEST.swap) / "events.jsonl")
    assert ["foreseen" in line for line in events if '"note"' in line] == [False, False, True]
    kept = files.read(world.folders.resolved("b-2")) or ""
    now = {"page_size": "32", "moe_runner_backend": '"triton"', "random_seed": "2"}
    assert decode(Resolved, kept) == Resolved("b-2", "0.5.24", now, served=True)


@pytest.mark.parametrize("ready", [True, False], ids=["serves", "starts"])
def test_a_death_after_which_no_plan_can_be_read_is_refused(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power cut: the users were sent away, nothing else was done, and the plans are torn."""
    url = f"http://10.0.0.5:{PORT}"
    world = before(tmp_path, WORLD)
    with contextlib.closing(FakeRouter(url)) as router:
        world.traffic = Traffic("10.0.0.5", (Router(router.url),), Drain(deadline=0.1))
        monkeypatch.setattr(drain, "SETTLED", 0.01)
        killed_at("note_found", world, monkeypatch)
        assert not router.workers
        for release in ("a-1", "b-2"):
            (world.folders.release(release) / "plan.json").unlink()
        asked = []
        monkeypatch.setattr(client.Client, "ready", lambda self: asked.append(self.base) or ready)
        with world.entered(monkeypatch):
            service.recover("main")
        assert asked == [url]
        assert set(router.workers) == ({url} if ready else set())
    report = world.reports[-1]
    assert (report.outcome, report.serving, world.serving) == ("refused", "a-1", {"a-1"})
    assert report.notes[1:] == (() if ready else ("the server is put into its routers when it is ready",))
    assert not world.folders.journal.exists()


def test_notes_outlive_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    monkeypatch.setattr(transaction.preflight, "sglang_notes", lambda _said: ["SGLang warns: an old flag"])
    killed_at("smoke", world, monkeypatch)
    with world.entered(monkeypatch):
        service.run("main", REQUEST.swap)
    assert world.reports[-1].outcome == "rolled-back"
    assert world.reports[-1].notes == ("SGLang warns: an old flag",)


def test_a_unit_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    write, asked = files.write, []

    def full(path: Path, *others: Any, **more: Any) -> None:
        if path == world.folders.candidate_unit:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *others, **more)

    def systemctl(*words: str, timeout: float = 60) -> str:
        asked.append(words[0])
        return world.systemd(*words, timeout=timeout)

    with world.entered(monkeypatch) as patch:
        patch.setattr(files, "write", full)
        patch.setattr(units, "_systemctl", systemctl)
        report = transaction.perform(world.folders, REQUEST)
    assert (report.outcome, report.failed_step, report.serving) == ("refused", "activate", "a-1")
    assert "stop" not in asked
    assert not world.folders.candidate_settings.exists()


def test_systemd_reads_the_candidate_while_the_old_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    asked = []

    def systemctl(*words: str, timeout: float = 60) -> str:
        asked.append(" ".join(words[:2]))
        return world.systemd(*words, timeout=timeout)

    with world.entered(monkeypatch) as patch:
        patch.setattr(units, "_systemctl", systemctl)
        assert transaction.perform(world.folders, REQUEST).outcome == "committed"
    changes = [words for words in asked if not words.startswith("show")]
    assert changes[:3] == ["reset-failed --", "stop --no-block", "daemon-reload"]
    assert "daemon-reload" not in changes[3 : changes.index("start --")], "nobody is served meanwhile"


@pytest.mark.parametrize(("seconds", "looks"), [(0.5, 1), (5.0, 2)])
def test_a_candidate_is_started_on_a_proof_that_is_fresh(
    seconds: float, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the agent may stand still between its look and the start, and no guard looks again."""
    world = before(tmp_path, WORLD)
    world.stage("b-2")
    text = files.read(world.folders.release("b-2") / UNIT) or ""
    files.write(world.folders.release("b-2") / UNIT, f"{text}\nExecStartPre=python3 {AGENT_PATH} guard main; true\n")
    prove, seen, late = clean.prove, [], [0.0]

    def counted(*others: Any) -> clean.Proof:
        seen.append(world.folders.candidate_unit.read_text())
        return prove(*others)

    @contextlib.contextmanager
    def slow(*_words: Any) -> Iterator[None]:
        yield
        late[0] += seconds

    uptime = host.uptime
    with world.entered(monkeypatch) as patch:
        patch.setattr(clean, "prove", counted)
        patch.setattr(units, "quarantined", slow)
        patch.setattr(host, "uptime", lambda: uptime() + late[0])
        patch.setattr(transaction.server, "wait_ready", lambda *_others: "ready")
        assert transaction.perform(world.folders, REQUEST).outcome == "committed"
    assert len(seen) == looks
    assert "guard" not in seen[0]
    assert "guard main" in world.folders.committed_unit.read_text()


def test_a_death_between_the_journal_and_the_router_leaves_the_server_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal says that it has left its router, which was not told: nothing else was done, so it serves on."""
    url = f"http://10.0.0.5:{PORT}"
    world = before(tmp_path, WORLD)
    with contextlib.closing(FakeRouter(url)) as router:
        world.traffic = Traffic("10.0.0.5", (Router(router.url),), Drain(deadline=0.1))
        world.stage("b-2")
        files.write(world.folders.request, encode(REQUEST), mode=0o600)

        def die(_self: object) -> None:
            journal = host.read_journal(world.folders)
            assert journal
            assert journal.left == (router.url,)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Member, "leave", die)
            with world.entered(monkeypatch), pytest.raises(KeyboardInterrupt):
                service.run("main", REQUEST.swap)
        monkeypatch.setattr(client.Client, "ready", lambda _self: True)
        with world.entered(monkeypatch):
            service.recover("main")
        assert set(router.workers) == {url}
    report = world.reports[-1]
    assert (report.outcome, report.serving, world.serving) == ("refused", "a-1", {"a-1"})
    assert not host.read_journal(world.folders), "its story is told"
