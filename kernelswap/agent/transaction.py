"""The swap: its steps in order, the way back from each, and the end of a story that died in the middle.

    preflight, drain, baseline, activate | stop, clean, start, ready, smoke, drift, accuracy, throughput, soak, open,
    nothing touched                      | commit; any failure: stop, clean, start the known-good, ready, smoke, open

Before each step the journal says which; so whoever opens it after a crash knows what may have been done. The commit
point is the rename of the unit into /etc: before it every road leads back, after it forward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import time
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from kernelswap import ledger, verdict
from kernelswap.agent import (
    clean,
    client,
    containers,
    drain,
    engine,
    files,
    gpus,
    guard,
    hooks,
    host,
    metrics,
    network,
    occupants,
    preflight,
    processes,
    retention,
    routers,
    server,
    units,
    zero,
)
from kernelswap.agent.clean import Dirty
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.events import Events
from kernelswap.agent.host import Folders, Journal
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.redaction import redact
from kernelswap.agent.routers import Member
from kernelswap.agent.served import differences, served
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import accuracy, budget, drift, health, smoke, soak, throughput
from kernelswap.measured import INSTALLED_FILE, SMOKE_FILE, ThroughputResult
from kernelswap.protocol import (
    Cause,
    HostFault,
    Plan,
    Report,
    Request,
    Resolved,
    StepResult,
    Throughput,
    Traffic,
    decode,
    encode,
)

# What a host does to a step; a fault of ours ends the agent.
HOST_FAULTS = (
    OSError,
    units.UnitError,
    gpus.GpuError,
    containers.ContainerError,
    Unanswered,
    subprocess.SubprocessError,
)
Numbers = Dict[str, float]
Step = Callable[[], "Seen"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a step saw: one line for people, figures for the report."""

    detail: str = ""
    numbers: Numbers = dataclasses.field(default_factory=dict)


def perform(folders: Folders, request: Request) -> Report:
    """Carry out a swap to its end. Holds no lock: the caller does."""
    previous = host.known_good(folders)
    journal = Journal(request, time.time(), host.boot_id(), previous=previous, uptime=host.uptime())
    return Transaction(folders, journal).forward()


def recover(folders: Folders, journal: Journal) -> Report:
    """Close the story of a swap whose agent died, at whatever step."""
    return Transaction(folders, journal).resume()


class Unfinished(Failed):
    """The commit has happened, but not all of it could be written."""


FRESH = 1.0  # seconds for which a proof of the clean host holds
ANSWERS = 30.0  # seconds for one token of a known-good that is to be measured
COMMIT_WAITS = (0, 1, 3)  # seconds before each try to write what is left to do after the commit point


class Transaction:
    """One swap on its way. Its state is the journal's."""

    def __init__(self, folders: Folders, journal: Journal) -> None:
        self.folders = folders
        self.journal = journal
        self.request = journal.request
        self.evidence = folders.evidence(self.request.swap)
        self.events = Events(self.evidence / "events.jsonl")
        self.started = 0.0  # when a server was started, seconds since the boot
        self.shut = True  # whether what runs may be shut off from other hosts
        self.proved = 0.0  # when the host was proved clean, seconds since the boot
        self.gpu_indices = ""  # of the instance's GPUs, as they were then
        self.stopped: Optional[float] = None  # when all that served had been stopped, seconds of the boot
        self.lacking = False  # whether the known-good must be measured before it stops
        self.key = ""  # by which results of the benchmark are compared
        self.known: Optional[ThroughputResult] = None  # what the candidate is compared to, see _compared_to
        self.traffic = Traffic()  # one that cannot be read stops the preflight, and no way back
        with contextlib.suppress(OSError, ValueError):
            self.traffic = host.traffic(folders)
        self.plan: Plan  # of the candidate; read by the preflight
        self.found: Occupants  # what is to be stopped; nothing that comes later is

    # The way forward.

    def forward(self) -> Report:
        if self._serves_already():
            units.enable(self.folders.unit)
            return self._close("unchanged", serving=self.request.release)
        try:
            self._step("preflight", self._preflight)
            self._step("drain", self._drain)
            wanted = self.plan.verify.throughput
            if wanted and self.lacking:
                self._step("baseline", lambda: self._baseline(wanted))
            for name, step in self._forward_steps():
                self._step(name, step)
        except Unfinished as half:
            return self._unfinished(half.cause)
        except Failed as failure:
            return self._fail(failure.cause)
        return self._close("committed", serving=self.request.release)

    def _serves_already(self) -> bool:
        """As after the end of a story that died in the middle: what was asked for may be what was brought back."""
        intact = host.is_intact(self.folders, self.request.release)
        return not self.request.force and intact and units.status(self.folders.unit).active == "active"

    def _forward_steps(self) -> List[Tuple[str, Step]]:
        judge: List[Tuple[str, Step]] = [("ready", self._ready), ("smoke", self._smoke)]
        wanted = self.plan.verify.throughput
        if self.plan.verify.drift:
            judge.append(("drift", self._drift))
        if self.plan.verify.accuracy:
            judge.append(("accuracy", self._accuracy))
        if wanted:
            judge.append(("throughput", lambda: self._throughput(wanted)))
        if self.plan.verify.min_healthy:
            judge.append(("soak", self._soak))
        exposed_after = {"ready": 1, "smoke": 2, "verified": len(judge)}[self.plan.expose]
        judge.insert(exposed_after, ("open", self._open))
        touch: List[Tuple[str, Step]] = [
            ("activate", self._activate),
            ("stop", self._stop),
            ("clean", self._clean_and_shut),
            ("start", lambda: self._start(self.plan)),
        ]
        return [*touch, *judge, ("commit", self._commit)]

    def _preflight(self) -> Seen:
        release = self.request.release
        where = str(self.folders.release(release))
        try:
            plan = host.read_plan(self.folders, release)
            self.plan = dataclasses.replace(plan, verify=plan.verify.asked(self.request.verify))
        except (OSError, ValueError) as error:
            raise Failed(
                Cause(f"release {release} is not staged here: {error}", where, "run the deploy again")
            ) from None
        history = host.history(self.folders)
        if release in ledger.barred(history) and not self.request.force:
            raise Failed(Cause(f"release {release} failed before and is barred", where, "change it, or use --force"))
        found = self._found()
        findings = preflight.look(self.folders, self.request, self.plan, found)
        for note in findings.notes:
            self._note(note)
        if faults := [*findings.faults, *drain.faults(self.folders, self.traffic, not self._is_rollback())]:
            raise self._refused(faults, where)
        self._foresee(findings.resolved)
        files.keep(self.evidence / INSTALLED_FILE, encode(engine.installed(self.plan, findings.gpus)))
        # What is staged was perhaps never synced, and the way back from here on may lead over a reboot.
        files.sync_tree(self.folders.release(release), top=self.folders.config.parent.parent)
        files.reserve(self.folders.reserve, host.RESERVE)
        self.lacking = self._lacks_baseline(findings)
        self._tell_budget()
        overrides = units.status(self.plan.unit).overrides
        changed = f"; the unit is changed by {', '.join(overrides)}" if overrides else ""
        return Seen(f"{len(found.all)} server(s) to replace{changed}{_others(found)}")

    def _refused(self, faults: Sequence[HostFault], where: str, signature: str = "preflight") -> Failed:
        """All that stands against the swap at once, and without secrets."""
        told = tuple(HostFault(self._redact(fault.what), self._redact(fault.todo)) for fault in faults)
        if len(told) == 1:
            return Failed(Cause(told[0].what, where, told[0].todo, signature))
        todo = "correct these and run the same command again"
        return Failed(Cause("; ".join(map(str, told)), where, todo, signature, faults=told))

    def _foresee(self, resolved: Optional[Resolved]) -> None:
        """Keep what SGLang made of the command line."""
        path = self.folders.resolved(self.request.release)
        with contextlib.suppress(OSError):
            files.remove(path)
            if resolved:
                files.write(path, encode(resolved), mode=0o600)

    def _note_served(self, plan: Plan, server: Client) -> None:
        """What the running server made of its command line is what counts; a difference is worth knowing."""
        path = self.folders.resolved(plan.release)
        foreseen = host.resolved(self.folders, plan.release)
        with contextlib.suppress(OSError, Unanswered):
            secrets = list(self._secrets(plan.release).values())
            found = served(server.server_info(), plan.release, secrets, foreseen)
            if foreseen and not foreseen.served:
                for line in differences(foreseen, found):
                    self._note(line)
            files.write(path, encode(found), mode=0o600)

    def _found(self) -> Occupants:
        try:
            return occupants.find(self.folders, self.plan)
        except gpus.GpuError as error:
            raise Failed(Cause(str(error), "nvidia-smi", "repair the driver, or reboot the host", "nvml")) from None

    def _lacks_baseline(self, findings: preflight.Findings) -> bool:
        """Whether the known-good must be measured before it stops, so that the candidate can be compared to it."""
        wanted, previous = self.plan.verify.throughput, self.journal.previous
        if wanted is None:
            return False
        self.key = throughput.key(self.plan, wanted, findings.gpus, findings.engine)
        if previous is None or wanted.regression is None:
            return False
        rollback = self._is_rollback()
        if rollback or wanted.baseline == "stored":
            self.known = throughput.stored(self.folders, self._compared_to(), self.key)
        if rollback:  # away from what may hang, and from what it need not be as fast as
            return False
        with contextlib.suppress(OSError, ValueError, units.UnitError):
            same_model = host.read_plan(self.folders, previous).model == self.plan.model
            return self.known is None and same_model and units.status(self.plan.unit).active == "active"
        return False

    def _tell_budget(self) -> None:
        names = ["baseline"] * self.lacking + [name for name, _ in self._forward_steps() if name in budget.STEPS]
        before = budget.last(host.history(self.folders), self.request.verify)
        known = self.known or throughput.stored(self.folders, self.journal.previous, self.key)
        self._say("preflight", "note", budget.text(names, self.plan.verify.throughput, known, before))

    def _drain(self) -> Seen:
        """Send the users away, and give their requests time to end. What still runs then ends with the clean stop."""
        port, serving = self._serving()
        if self.traffic.routers or "drain" in self.traffic.hooks:
            self.journal = dataclasses.replace(self.journal, away=True, port=port)
            self._write_journal(back=False)
            self._hook("drain")
        faults = self._leave(port)
        if faults and not self._is_rollback():
            raise self._refused(faults, "the router's log", "router")
        for fault in faults:
            self._note(str(fault))
        left = len(self.journal.left)
        seen = drain.wait(serving, self.traffic.drain, left, may_fail=not self._is_rollback())
        if not self.lacking:
            self._note_found()
        return Seen(seen)

    def _serving(self) -> Tuple[int, Client]:
        """The port of what serves now, and who asks it. Where that is nothing of ours, or its plan is lost, the
        candidate's plan tells its port, and it gets no key of ours."""
        with contextlib.suppress(OSError, ValueError):
            if self.journal.previous:
                plan = host.read_plan(self.folders, self.journal.previous)
                return plan.port, self._client(plan)
        return self.plan.port, Client(client.base_url(self.plan), self.plan.served_name)

    def _unplanned(self) -> Client:
        """Who asks the server that users were sent away from, where no plan tells of it any more."""
        return Client(client.url(client.from_here(self.traffic.address), self.journal.port), "")

    def _leave(self, port: int) -> List[HostFault]:
        """Take the server out of its routers, each one in the journal first; returns what went wrong and may not."""
        members, ours = routers.members(self.traffic, port), self.journal.previous is not None

        def leaving(url: str) -> None:
            self.journal = dataclasses.replace(self.journal, left=(*self.journal.left, url))
            self._write_journal(self.journal.back)

        return drain.leave(members, self.traffic.drain, ours, leaving, self._note)

    def _let_in(self, members: Sequence[Member], back: bool) -> str:
        """Bring the users: into the routers, then the open hook. Raises Failed, but not on the way back."""
        release = (self.journal.previous if back else None) or self.request.release
        seen = drain.let_in(members, self._secrets(release).get("api-key", ""), back, self._note)
        try:
            self._hook("open")
        except Failed as failure:
            if not back:
                raise
            self._note(failure.cause.what)
        return seen

    def _let_back_in(self, port: int) -> str:
        """Bring back the users who were sent away from what serves again, whatever that takes. port: its."""
        if not self.journal.away:
            return ""
        members = routers.members(self.traffic, port)
        if self.journal.previous is None:  # which we had not put there
            members = [member for member in members if member.router.url in self.journal.left]
        return self._let_in(members, back=True)

    def _hook(self, moment: str, report: Optional[Report] = None) -> None:
        """Tell whoever wants to know of a moment. Raises Failed where that fails."""
        hook = self.traffic.hooks.get(moment)
        if hook is None:
            return
        outcome, cause = (report.outcome, report.cause) if report else (None, None)
        what = self._redact(cause.what) if cause else None
        told = hooks.tell(hook, hooks.message(moment, self.journal, outcome, what))
        name = hooks.describe(moment, hook)
        self._keep(hooks.HOOKS_FILE, [f"{name}: {told.problem or 'ok'}", *told.output.splitlines()])
        if told.problem:
            kept = str(self.evidence / hooks.HOOKS_FILE)
            raise Failed(Cause(f"{name} {told.problem}", kept, "see what it said, and repair it", "hook"))

    def _baseline(self, wanted: Throughput) -> Seen:
        """Measure the known-good as the candidate will be, shut off from others. Trouble with that is told, and no
        reason for anything else."""
        try:
            old = host.read_plan(self.folders, str(self.journal.previous))
            units.quarantine(old.unit, network.own_addresses())
            if left := drain.left_running(self._client(old), self.traffic.drain.deadline):
                raise throughput.Unmeasured(f"{left} request(s) of others are still running")
            self._client(old).generate(smoke.unique("baseline?"), 1, ANSWERS)  # one that hangs ends this here
            target = throughput.Target(old, self._secrets(old.release))
            tell = self._tell("baseline")
            self.known = throughput.baseline(self.plan, wanted, target, self.key, self.evidence, tell)
            throughput.keep(self.folders, self.known)
            seen = throughput.text_of(self.known)
        except (Failed, throughput.Unmeasured, ValueError, *HOST_FAULTS) as error:
            self.known = throughput.stored(self.folders, self._compared_to(), self.key)
            what = "compared with what is stored of it" if self.known else "not compared to it"
            seen = f"not measured, so the candidate is {what}: {error}"
        self._note_found()
        return Seen(seen)

    def _note_found(self) -> None:
        """Before anything stops, write down all that is needed to bring it back."""
        self.found = found = self._found()
        newcomers = preflight.strays(self.request, self.plan, found)
        if newcomers:
            raise self._refused(newcomers, "ps")
        there = zero.note(self.plan, found, first=self.journal.previous is None)
        # Where another server had taken the place of ours, that one is what served, and what comes back.
        previous = None if there and not found.own else self.journal.previous
        self.journal = dataclasses.replace(self.journal, zero=there, previous=previous)

    def _activate(self) -> Seen:
        """Write down what comes to run, so that a disk which does not take it stops nothing. Until systemd is told to
        read it, it changes nothing either."""
        text = (self.folders.release(self.request.release) / self.plan.unit).read_text(encoding="utf-8")
        unguarded = guard.without(text, self.plan.instance)  # what it would look for is proved here, see _start
        units.write_candidate(self.folders.candidate_unit, self.folders.candidate_settings, unguarded)
        units.forgive(self.plan.unit)
        return Seen(f"{self.request.release} under /run")

    def _stop(self) -> Seen:
        found, there = self.found, self.journal.zero
        timeout = self.plan.timeouts.stop
        ended = []
        try:
            if units.ask_to_stop(self.plan.unit):
                ended.append(self.plan.unit)
            units.reload()  # to read the candidate's unit takes a while, so it is done while the server stops
            units.stop(self.plan.unit, timeout)
            for unit in there.units:
                if unit.name == self.plan.unit:
                    continue
                units.stop(unit.name, timeout)
                units.mask_until_reboot(unit.name)
                ended.append(unit.name)
            for container in there.containers:
                containers.stop(container, timeout)
                ended.append(str(container))
        except (units.UnitError, containers.ContainerError) as error:
            raise Failed(Cause(str(error), f"systemctl status {self.plan.unit}", "see what keeps it", "stop")) from None
        heads = [*found.strays, *(found.foreign if self.plan.end_foreign else ())]
        bare = [process for process in heads if not process.container]
        starters = occupants.transient_units(found.strays)
        left = processes.end(bare, timeout, spare=[process.pid for process in found.bystanders])
        for name in starters:
            units.stop(name, timeout)
        self.stopped = host.uptime()
        if left:
            what = "; ".join(map(processes.stuck, left))
            raise Failed(Cause(f"would not end: {what}", "/proc/PID/stack", "reboot the host", "stop"))
        ended += [f"{process.engine + ' ' if process.engine else ''}pid {process.pid}" for process in bare]
        return Seen(", ".join(ended) or "nothing ran")

    def _clean_and_shut(self) -> Seen:
        """What starts next is shut off from others while the host is looked at: nobody is served meanwhile."""
        with units.quarantined(self.plan.unit, network.own_addresses()):
            return self._clean(self.plan)

    def _clean(self, plan: Plan) -> Seen:
        try:
            proof = clean.prove(self.folders, plan, plan.timeouts.clean, self.stopped)
        except Dirty as dirty:
            self._keep("not-clean.txt", dirty.left)
            raise Failed(Cause(f"the host is not clean: {dirty}", "nvidia-smi", dirty.todo, "not-clean")) from None
        self.proved = host.uptime()
        self.gpu_indices = gpus.numbering(proof.gpus, plan.gpus) if plan.gpus else ""
        self._keep("clean.txt", proof.seen)
        idle = f", {len(proof.held)} GPU(s) idle" if proof.held else ""
        return Seen(f"no SGLang process, no listener on port {plan.port}{idle}")

    def _keep(self, name: str, lines: Sequence[str]) -> None:
        """Add to the evidence. A full disk loses it, and nothing else."""
        with contextlib.suppress(OSError):
            files.append(self.evidence / name, self._redact("\n".join(lines)))

    def _start(self, plan: Plan, back: bool = False) -> Seen:
        self.started = host.uptime()
        try:
            if back:
                self._shut_known_good(plan)
            else:
                if host.uptime() - self.proved > FRESH:
                    self._clean(plan)
                guard.number_gpus(self.folders, self.gpu_indices)
            units.start(plan.unit, timeout=plan.timeouts.clean + 60, forgiven=not back)
        except units.UnitError as error:
            failure = server.unit_failure(plan, units.status(plan.unit), str(error))
            raise Failed(dataclasses.replace(failure.cause, blame="host")) from None  # it never came to run
        return Seen(f"main pid {units.status(plan.unit).main_pid}")

    def _shut_known_good(self, plan: Plan) -> None:
        """One that is reachable too early is better than none, as with a full /run."""
        try:
            units.quarantine(plan.unit, network.own_addresses())
        except units.UnitError:
            self.shut = False

    def _ready(self) -> Seen:
        return Seen(server.wait_ready(self.plan, self._client(self.plan), self.started, self._tell("ready")))

    def _smoke(self) -> Seen:
        self._note_served(self.plan, self._client(self.plan))
        known = smoke.known(self.folders, self._compared_to())
        with self._dead_server_speaks():
            seen, numbers = smoke.check(self.plan, self._client(self.plan), self._since(), known)
        self._keep(SMOKE_FILE, [json.dumps(numbers)])
        return Seen(seen, numbers)

    def _drift(self) -> Seen:
        with self._dead_server_speaks():
            seen = drift.check(self.plan, self._client(self.plan), self.folders, self.evidence, self._compared_to())
        self._still_alive()
        return Seen(*seen)

    def _accuracy(self) -> Seen:
        key = self._secrets(self.request.release).get("api-key", "")
        with self._dead_server_speaks():
            return Seen(*accuracy.check(self.plan, key, self.folders, self.evidence, self._compared_to()))

    def _is_rollback(self) -> bool:
        return self.request.action == "rollback"

    def _compared_to(self) -> Optional[str]:
        """The release whose answers and speed count as right: on a rollback its own of then, not what it replaces."""
        return self.request.release if self._is_rollback() else self.journal.previous

    def _soak(self) -> Seen:
        with self._dead_server_speaks():
            return Seen(*soak.check(self.plan, self._client(self.plan), self._since()))

    def _since(self) -> float:
        """When the server was started, epoch seconds; systemd knows where another agent did."""
        if self.started:
            return time.time() - (host.uptime() - self.started)
        return units.status(self.folders.unit).since or time.time()

    def _throughput(self, wanted: Throughput) -> Seen:
        keys, tell = self._secrets(self.request.release), self._tell("throughput")
        with self._dead_server_speaks():
            verdict = throughput.check(self.plan, wanted, keys, self.known, self.key, self.evidence, tell)
        self._still_alive()
        if verdict.verdict == "inconclusive":
            self._note(f"throughput is inconclusive: {verdict.why}")
        return Seen(throughput.text(verdict), throughput.numbers(verdict))

    @contextlib.contextmanager
    def _dead_server_speaks(self) -> Iterator[None]:
        """Where a check fails because the server died, the server's own error is the cause."""
        try:
            yield
        except Failed:
            time.sleep(1)  # systemd learns of an end a moment later
            self._still_alive()
            raise

    def _still_alive(self) -> None:
        status = units.status(self.plan.unit)
        if status.active != "active":
            raise server.unit_failure(self.plan, status, f"the server ended ({status.active}, {status.result})")

    def _open(self) -> Seen:
        self._still_alive()
        units.lift_quarantine(self.plan.unit)
        self.journal = dataclasses.replace(self.journal, entered=True)
        self._write_journal(back=False)
        members = routers.members(self.traffic, self.plan.port)
        return Seen("reachable from outside" + self._let_in(members, back=False))

    def _commit(self) -> Seen:
        """Idempotent, since a recovery after the commit point runs it again."""
        self._tell_xids()
        release, where = self.request.release, str(self.folders.committed_unit)
        try:
            for unit in self.journal.zero.units:
                if unit.enabled:
                    units.disable(unit.name)
            text = (self.folders.release(release) / self.plan.unit).read_text(encoding="utf-8")
            files.write(self.folders.committed_unit, text)
        except (OSError, units.UnitError) as error:
            if not self._is_past_commit_point():  # it may be renamed and not synced
                todo = "make /etc writable, and see what systemd says"
                raise Failed(Cause(f"cannot commit {release}: {error}", where, todo, "commit")) from None
        for wait in COMMIT_WAITS:
            time.sleep(wait)
            try:
                host.spare(self.folders, self._finish_commit)
                return Seen(f"{release} is the known-good")
            except (OSError, units.UnitError) as error:
                fault = str(error)
        todo = "make /etc writable, see what systemd says, and run the same command again"
        raise Unfinished(Cause(fault, str(self.folders.config), todo, "commit"))

    def _finish_commit(self) -> None:
        files.sync_folder(self.folders.committed_unit.parent)
        host.keep_measured(self.folders, self.request)
        files.link(self.folders.known_good, f"releases/{self.request.release}")
        units.drop_candidate(self.folders.candidate_unit, self.folders.candidate_settings)
        units.enable(self.plan.unit)

    def _unfinished(self, cause: Cause) -> Report:
        release = self.request.release
        detail = f"{release} serves and was verified, but its commit could not be finished"
        return self._close("down", serving=release, cause=cause, detail=detail)

    # The way back.

    def _fail(self, cause: Cause) -> Report:
        if not self.journal.touched:
            return self._refuse(cause)
        cause = gpus.blamed(self._keep_log(cause), self.plan, self.journal.started)
        self.journal = dataclasses.replace(self.journal, back=True, cause=encode(cause))
        return self._back(cause)

    def _refuse(self, cause: Cause, lost: bool = False) -> Report:
        """Nothing was touched: what served, if anything did, goes on serving. lost: no plan can be read any more."""
        done = {step.name for step in self.journal.steps} | {self.journal.step}  # in which the agent may have died
        if "baseline" in done:
            units.lift_quarantine(self.folders.unit)
        if done & {"baseline", "activate"}:
            units.drop_candidate(self.folders.candidate_unit, self.folders.candidate_settings)
        serves = units.status(self.folders.unit).running  # after a boot it may still be starting
        if self.journal.away:
            port, serving = (self.journal.port, self._unplanned()) if lost else self._serving()
            if serving.ready():
                self._let_back_in(port)
            else:
                self._note("the server is put into its routers when it is ready")
        return self._close("refused", serving=self.journal.previous if serves else None, cause=cause)

    def _back(self, cause: Cause, stop: bool = True, rebooted: bool = False) -> Report:
        """Bring back what served before. stop: whether what runs in the unit may be the candidate.

        rebooted: systemd is starting what is enabled, behind the guard; there is nothing of before to be cleaned.
        """
        previous = self.journal.previous
        try:
            if stop:
                self._step("stop", self._stop_candidate, back=True)
            if previous is None:
                return self._back_to_zero(cause, rebooted)
            plan = host.read_plan(self.folders, previous)
            if stop or not units.status(plan.unit).running:
                if not rebooted:
                    self._step("clean", lambda: self._clean(plan), back=True)
                self._step("start", lambda: self._restart(plan), back=True)
            return self._verify_back(plan, cause)
        except (Failed, ValueError, *HOST_FAULTS) as error:
            return self._down(cause, f"rolling back to {previous or 'what served before'} failed: {error}")

    def _restart(self, plan: Plan) -> Seen:
        """Start the known-good from its own unit, whatever has become of the one in /etc."""
        text = (self.folders.release(plan.release) / plan.unit).read_text(encoding="utf-8")
        if files.read(self.folders.committed_unit) != text:
            files.write(self.folders.committed_unit, text)
            units.reload()
        if host.known_good(self.folders) != plan.release:
            files.link(self.folders.known_good, f"releases/{plan.release}")
        return self._start(plan, back=True)

    def _verify_back(self, plan: Plan, cause: Cause) -> Report:
        old = self._client(plan)
        tell = self._tell("< ready")
        self._step("ready", lambda: Seen(server.wait_ready(plan, old, self.started, tell)), back=True)
        self._note_served(plan, old)
        # From here on the known-good answers: whatever our checks say, it is not stopped again.
        try:
            known = smoke.known(self.folders, plan.release)
            self._step("smoke", lambda: Seen(*smoke.check(plan, old, self._since(), known)), back=True)
        except Failed as failure:
            self._open_known_good(plan)
            detail = f"{plan.release} runs again, but it failed its checks: {failure.cause.what}"
            return self._close("down", serving=plan.release, cause=cause, detail=detail)
        self._step("open", lambda: self._open_known_good(plan), back=True)
        return self._close("rolled-back", serving=plan.release, cause=cause)

    def _stop_candidate(self) -> Seen:
        if self.journal.entered:  # it has users by now, and they are no reason to leave it running
            self.journal = dataclasses.replace(self.journal, away=True)
            for fault in self._leave(self.plan.port):
                self._note(str(fault))
            settled = drain.SETTLED if self.traffic.routers else 0
            drain.left_running(self._client(self.plan), self.traffic.drain.deadline, settled)
        units.stop(self.plan.unit, self.plan.timeouts.stop)
        if self.journal.previous:  # what ran beside it may not have been stopped yet
            for unit in self.journal.zero.units:
                units.stop(unit.name, self.plan.timeouts.stop)
        units.drop_candidate(self.folders.candidate_unit, self.folders.candidate_settings)
        return Seen(self.plan.unit)

    def _open_known_good(self, plan: Plan) -> Seen:
        candidate = (self.folders.candidate_unit, self.folders.candidate_settings)
        try:
            units.lift_quarantine(plan.unit)
        except units.UnitError:
            units.drop_candidate(*candidate)  # which makes room where /run is full
            if self.shut:
                units.lift_quarantine(plan.unit)
        units.drop_candidate(*candidate)
        # What ran beside it gave way to the candidate, and comes back too.
        beside = zero.start(self.folders, self.plan, self.journal.zero) if self.journal.zero else ""
        entered = self._let_back_in(plan.port)
        return Seen(f"reachable from outside{entered}" + (f"; {beside} started again" if beside else ""))

    def _back_to_zero(self, cause: Cause, rebooted: bool) -> Report:
        there = self.journal.zero
        if not there:
            return self._down(cause, "nothing served before, so there is nothing to go back to")
        if not rebooted and not zero.some_runs(self.folders, self.plan, there):
            self._step("clean", lambda: self._clean(self.plan), back=True)
        names = self._step("start", lambda: Seen(zero.start(self.folders, self.plan, there)), back=True).detail
        self._step("ready", lambda: Seen(zero.wait_healthy(self.folders, self.plan, there)), back=True)
        self._let_back_in(self.plan.port)
        return self._close("rolled-back", serving=None, cause=cause, detail=f"{names} serves again")

    def _down(self, cause: Cause, detail: str) -> Report:
        # A known-good that still comes up must not stay shut off from its users; a candidate must.
        with contextlib.suppress(units.UnitError):
            if not self.folders.candidate_unit.exists():
                units.lift_quarantine(self.folders.unit)
        return self._close("down", serving=None, cause=cause, detail=detail)

    # The end of a story that died in the middle.

    def resume(self) -> Report:
        done = host.report(self.folders, self.request.swap)
        if done:
            host.record(self.folders, done)
            metrics.write(self.folders)
            return done
        rebooted = self.journal.boot != host.boot_id()
        death = "the host rebooted" if rebooted else "the agent died"
        cause = Cause(f"{death} during the step {self.journal.step}", str(self.evidence), "run the same command again")
        self._say(self.journal.step, "note", f"{cause.what}: finishing its story")
        self._record(StepResult(self._shown(), 0, ok=False, detail=cause.what))
        try:
            # To stop the candidate, the known-good's plan will do.
            self.plan = self._readable_plan(self.request.release, self.journal.previous)
        except (OSError, ValueError) as error:
            if self.journal.touched:
                return self._down(cause, f"no plan can be read any more: {error}")
            return self._refuse(cause, lost=True)
        if not self.journal.touched:
            return self._refuse(cause)
        if self.journal.step == "commit" and not self.journal.back and self._is_past_commit_point():
            try:
                self._step("commit", self._commit)
            except Unfinished as half:
                return self._unfinished(half.cause)
            if rebooted and not units.status(self.plan.unit).running:
                units.start(self.plan.unit, timeout=self.plan.timeouts.clean + 60)
            return self._close("committed", serving=self.request.release)
        candidate_may_run = not rebooted and not self._known_good_runs()
        if self.journal.back and self.journal.cause:
            cause = decode(Cause, self.journal.cause)
        else:
            self.journal = dataclasses.replace(self.journal, back=True, cause=encode(cause))
        return self._back(cause, stop=candidate_may_run, rebooted=rebooted)

    def _readable_plan(self, *releases: Optional[str]) -> Plan:
        """The first plan that can be read. Raises OSError or ValueError for the last one if none can."""
        for release in filter(None, releases[:-1]):
            with contextlib.suppress(OSError, ValueError):
                return host.read_plan(self.folders, release)
        return host.read_plan(self.folders, releases[-1] or str(releases[0]))

    def _is_past_commit_point(self) -> bool:
        text = files.read(self.folders.release(self.request.release) / self.plan.unit)
        return text is not None and files.read(self.folders.committed_unit) == text

    def _known_good_runs(self) -> bool:
        """Whether a rollback of this boot had started the known-good already."""
        return (
            self.journal.back
            and self.journal.step in ("ready", "smoke", "open")
            and units.status(self.plan.unit).active == "active"
        )

    # What every step shares.

    def _step(self, name: str, step: Step, back: bool = False) -> Seen:
        """Write down what comes, do it, and record how long it took and what it saw. Raises Failed."""
        touched = self.journal.touched
        self.journal = dataclasses.replace(self.journal, step=name, touched=touched or name == "stop")
        shown = self._shown(back)
        start = time.monotonic()
        try:
            try:
                self._write_journal(back)
            except Failed:  # then it is not done either
                self.journal = dataclasses.replace(self.journal, touched=touched)
                raise
            self._say(shown, "begin")
            seen = self._guarded(name, step)
        except Failed as failure:
            seconds = round(time.monotonic() - start, 2)
            cause = dataclasses.replace(failure.cause, what=self._redact(failure.cause.what))
            self._record(StepResult(shown, seconds, ok=False, detail=cause.brief, numbers=failure.numbers))
            self._say(shown, "failed", cause.brief, seconds)
            raise type(failure)(cause) from failure
        seconds = round(time.monotonic() - start, 2)
        detail = self._redact(seen.detail)
        self._record(StepResult(shown, seconds, ok=True, detail=detail, numbers=seen.numbers))
        self._say(shown, "end", detail, seconds)
        return seen

    def _shown(self, back: Optional[bool] = None) -> str:
        return f"< {self.journal.step}" if (self.journal.back if back is None else back) else self.journal.step

    def _write_journal(self, back: bool) -> None:
        """Raises Failed on the way forward; the way back is gone without a journal too, as it can be gone again."""
        try:
            if back:
                host.spare(self.folders, lambda: host.write_journal(self.folders, self.journal))
            else:
                host.write_journal(self.folders, self.journal)
        except OSError as error:
            if not back:
                what, todo = f"cannot write the journal: {error.strerror}", "free the disk, or make it writable"
                raise Failed(Cause(what, str(self.folders.state), todo)) from None

    def _record(self, step: StepResult) -> None:
        """For the report, and kept with the next step's journal, so that it outlives us."""
        self.journal = dataclasses.replace(self.journal, steps=(*self.journal.steps, step))

    def _say(self, step: str, kind: str, text: str = "", seconds: Optional[float] = None) -> None:
        self.events.emit(step, kind, self._redact(text), seconds)

    def _note(self, text: str) -> None:
        """Tell what stands in no way, and keep it for the report."""
        line = self._redact(text)
        self._say(self._shown(), "note", line)
        self.journal = dataclasses.replace(self.journal, notes=(*self.journal.notes, line))

    def _redact(self, text: str) -> str:
        """Log lines are quoted in causes and progress, and a server may have logged its key."""
        releases = [self.request.release, self.journal.previous]
        values = [value for name in releases if name for value in self._secrets(name).values()]
        values += [secret for router in self.traffic.routers if (secret := router.key)]
        return redact(text, [*values, *(hook.webhook for hook in self.traffic.hooks.values())])

    @staticmethod
    def _guarded(name: str, step: Step) -> Seen:
        """Turn what the host does to a step into its failure; after a fault of ours a recovery rolls back.

        Not for the commit: past the commit point only a recovery, which goes forward, is right.
        """
        if name == "commit":
            return step()
        try:
            return step()
        except HOST_FAULTS as error:
            raise Failed(Cause(f"{type(error).__name__}: {error}", name, "see what the host says", name)) from error

    def _close(self, outcome: str, serving: Optional[str], cause: Optional[Cause] = None, detail: str = "") -> Report:
        report = self._told(self._report(outcome, serving, cause, detail))
        files.keep(self.evidence / "report.json", encode(report))  # the history holds it too
        host.record(self.folders, report)
        if outcome in ("committed", "unchanged", "refused"):
            retention.prune(self.folders)
        metrics.write(self.folders)
        self._say("result", "result", verdict.text(report))
        return report

    def _told(self, report: Report) -> Report:
        """The report, with a note where the result hook failed. An agent that dies in it tells the end again."""
        if report.outcome == "unchanged":
            return report
        try:
            self._hook("result", report)
        except Failed as failure:
            self._note(failure.cause.what)
        return dataclasses.replace(report, notes=self.journal.notes)

    def _report(self, outcome: str, serving: Optional[str], cause: Optional[Cause], detail: str) -> Report:
        return Report(
            request=self.request,
            outcome=outcome,
            started=self.journal.started,
            ended=self.journal.started + self._elapsed(),
            previous=self.journal.previous,
            serving=serving,
            cause=cause,
            detail=detail,
            evidence=str(self.evidence),
            steps=self.journal.steps,
            notes=self.journal.notes,
        )

    def _elapsed(self) -> float:
        """Seconds since the start of the swap: by the clock only where a reboot has ended the better count."""
        journal = self.journal
        if journal.uptime is not None and journal.boot == host.boot_id():
            return host.uptime() - journal.uptime
        return max(0.0, time.time() - journal.started)

    def _client(self, plan: Plan) -> Client:
        key = self._secrets(plan.release).get("api-key", "")
        return Client(client.base_url(plan), plan.served_name, key)

    def _secrets(self, release: str) -> Dict[str, str]:
        return host.secrets(self.folders, release)

    def _keep_log(self, cause: Cause) -> Cause:
        """Keep what the candidate logged, without its secrets; a cause that was found in the log then points there."""
        kept = self.evidence / "server.log"
        with contextlib.suppress(units.UnitError, OSError, subprocess.TimeoutExpired):
            lines = units.log(units.status(self.plan.unit).invocation)
            values = list(self._secrets(self.request.release).values())
            files.write(kept, redact("\n".join(lines), values) + "\n", mode=0o600)
            if cause.where.startswith("journalctl"):
                return dataclasses.replace(cause, where=f"{kept}:{cause.line}" if cause.line else str(kept))
        return cause

    def _tell_xids(self) -> None:
        with contextlib.suppress(OSError, gpus.GpuError):
            for line in health.gpu_errors(self.plan, self.journal.started):
                self._note(f"{line} during this swap")

    def _tell(self, step: str) -> Callable[[str], None]:
        return lambda text: self._say(step, "progress", text)


def _others(found: Occupants) -> str:
    """What is here too and stays as it is, for people to know."""
    left = [processes.describe(process) for process in [*found.bystanders, *found.watchers]]
    return f"; left alone: {'; '.join(left)}" if left else ""
