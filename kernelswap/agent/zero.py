"""Release zero: what served an instance before its first swap, how it is noted and brought back."""

from __future__ import annotations

import subprocess
import time
from typing import Iterator, List, Optional, Set, Tuple

from kernelswap.agent import client, containers, files, gpus, network, occupants, processes, units
from kernelswap.agent.client import Client
from kernelswap.agent.containers import FoundContainer
from kernelswap.agent.host import Folders, FoundProcess, FoundUnit, ReleaseZero
from kernelswap.agent.occupants import Occupants
from kernelswap.agent.processes import Process
from kernelswap.agent.server import Failed
from kernelswap.protocol import Cause, Plan


def note(plan: Plan, found: Occupants, first: bool) -> ReleaseZero:
    """All that is needed to bring back what a swap is about to stop. first: nothing was ever committed.

    Raises Failed where a container cannot be asked, or a process has ended since.
    """
    foreign = found.foreign_units if plan.end_foreign else {}
    states = units.statuses({plan.unit, *found.units, *foreign})
    serving = {*found.units, *_own_by_hand(plan, found, first, states[plan.unit].fragment)}
    others = set(foreign) - set(found.units)
    return ReleaseZero(
        units=tuple(
            FoundUnit(name, states[name].enabled, serves=serves)
            for names, serves in ((serving, True), (others, False))
            for name in sorted(names)
        ),
        processes=tuple(_capture(head) for head in found.strays if head.is_launcher and not head.container),
        containers=tuple(_containers(plan, found)),
    )


def _own_by_hand(plan: Plan, found: Occupants, first: bool, there: str) -> Set[str]:
    """Our own unit's name where a hand-written unit has it: it lies under /etc until a commit replaces it.

    there: the file of the unit that has the name.
    """
    return {plan.unit} if first and found.own and there and not there.startswith("/run/") else set()


def _containers(plan: Plan, found: Occupants) -> Iterator[FoundContainer]:
    serving = {place for head in found.strays if (place := head.container)}
    others = {place for head in found.foreign if (place := head.container)} if plan.end_foreign else set()
    for where in sorted(serving | others, key=str):
        try:
            yield containers.found(where, containers.ask(where), serves=where in serving)
        except containers.ContainerError as error:
            raise Failed(Cause(str(error), where.runtime, "run the same command again", "container")) from None


def _capture(process: Process) -> FoundProcess:
    pid = process.pid
    try:
        folder, group = processes.working_folder(pid), processes.group_id(pid)
        return FoundProcess(process.argv, processes.environment(pid), folder, process.uid, group)
    except OSError:  # it has ended
        what = f"it ended while its place was noted: {processes.describe(process)}"
        raise Failed(Cause(what, "ps", "run the same command again", "preflight")) from None


def some_runs(folders: Folders, plan: Plan, zero: ReleaseZero) -> bool:
    """Whether some of it runs: it was not stopped yet, or is back already; then there is no clean host to prove."""
    back = len(zero.processes) - len(_missing(folders, plan, zero))
    return back > 0 or any(state.running for state in units.statuses(unit.name for unit in zero.units).values())


def _missing(folders: Folders, plan: Plan, zero: ReleaseZero) -> List[int]:
    """Which adopted processes run neither in the unit that we made for them, nor started again by others."""
    again = {head.argv for head in _servers(folders, plan).strays}
    return [
        number
        for number, process in enumerate(zero.processes)
        if process.argv not in again and not units.status(_unit_of(folders, number)).running
    ]


def _servers(folders: Folders, plan: Plan) -> Occupants:
    """Who is there. Ports and command lines tell most of it where the GPUs cannot be asked."""
    try:
        return occupants.find(folders, plan)
    except gpus.GpuError:
        return occupants.find(folders, plan, ())


def start(folders: Folders, plan: Plan, zero: ReleaseZero) -> str:
    """Bring it back; returns its names. Raises Failed, units.UnitError or containers.ContainerError."""
    for unit in zero.units:
        units.unmask(unit.name)
        units.start(unit.name, timeout=300)
        if unit.enabled and not units.status(unit.name).enabled:
            units.enable(unit.name)
    for number in _missing(folders, plan, zero):
        _start_process(folders, number, zero.processes[number])
    for container in zero.containers:
        containers.start(container)
    adopted = [_unit_of(folders, number) for number in range(len(zero.processes))]
    return ", ".join([*(unit.name for unit in zero.units), *adopted, *map(str, zero.containers)])


def _start_process(folders: Folders, number: int, process: FoundProcess) -> None:
    """Start an adopted process again, as a transient unit with its own words, environment, folder and user."""
    name = _unit_of(folders, number)
    variables = folders.state / f"adopted-{number}.env"
    # Inside double quotes of an EnvironmentFile only these four are special.
    quoted = {
        key: "".join("\\" + c if c in '"\\`$' else c for c in value) for key, value in process.environment.items()
    }
    files.write(variables, "".join(f'{key}="{value}"\n' for key, value in quoted.items()), mode=0o600)
    command = ["systemd-run", "--quiet", "--collect", f"--unit={name}", f"--uid={process.uid}", f"--gid={process.gid}"]
    command += [f"--working-directory={process.folder}", f"--property=EnvironmentFile={variables}"]
    command += ["--property=Type=exec"]  # so that it has read its environment when the command returns
    # systemd expands $ in the words of a command; a doubled one stays as it is.
    command += ["--", *(word.replace("$", "$$") for word in process.argv)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        files.remove(variables)
    if done.returncode:
        where = f"journalctl -u {name}"
        raise Failed(Cause(f"cannot start it again: {done.stderr.strip()}", where, "start it by hand", "adopted"))


def _unit_of(folders: Folders, number: int) -> str:
    return f"kernelswap-adopted-{folders.instance}-{number}.service"


def wait_healthy(folders: Folders, plan: Plan, zero: ReleaseZero) -> str:
    """Wait for `/health` of every server that was brought back; it generates a token and needs no key."""
    expected = len(zero.processes) + sum(unit.serves for unit in zero.units)
    expected += sum(container.serves for container in zero.containers)
    until = time.monotonic() + plan.timeouts.ready
    while True:
        heads = [head for head in _servers(folders, plan).all if head.is_launcher]
        if len(heads) >= expected and all(_is_healthy(_published(head, zero.containers)) for head in heads):
            return f"/health of {len(heads)} server(s)"
        if time.monotonic() > until:
            what = f"no healthy server within {plan.timeouts.ready:g} s"
            raise Failed(Cause(what, "systemctl status", "start it by hand", "release-zero"))
        time.sleep(0.5)


def _published(head: Process, found: Tuple[FoundContainer, ...]) -> Optional[int]:
    """The port of the host at which a server answers."""
    for container in found:
        if head.container == container.place:
            return container.ports.get(str(head.port), head.port)
    return head.port


def _is_healthy(port: Optional[int]) -> bool:
    if port is None:
        return False
    urls = [
        f"http://127.0.0.1:{port}",
        *(client.url(address, port) for address in network.own_addresses() if "/" not in address),
    ]
    return any(Client(url, "").status("/health", 30) == 200 for url in urls)
