"""Answers what a comparison asks: what is staged here, what SGLang made of it, and what really runs."""

from __future__ import annotations

import contextlib
import re
import shutil
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from kernelswap.agent import client, files, host, inspection, occupants, processes
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.host import Folders
from kernelswap.agent.processes import Process
from kernelswap.agent.redaction import hide_secrets, redact
from kernelswap.agent.running import running
from kernelswap.agent.served import served
from kernelswap.protocol import HostReleases, LiveServer, Plan, Releases, unit_name

# What systemd (systemd.exec(5)), PAM, sudo and shells add to every process of theirs: no part of a server.
AMBIENT = re.compile(
    r"_|USER|LOGNAME|USERNAME|SHELL|MAIL|PWD|OLDPWD|SHLVL|HOSTNAME|TERM|TERM_\w+|COLORTERM|EDITOR|PAGER|LANG|LANGUAGE|LC_\w+"
    r"|LS_COLORS|LESS\w*|DISPLAY|PS1|MOTD_SHOWN|TMUX\w*|STY|WINDOW|(?:SSH|SUDO|XDG|DBUS|GPG|VSCODE|MEMORY_PRESSURE)_\w+"
    r"|(?:RUNTIME|STATE|CACHE|LOGS|CONFIGURATION|CREDENTIALS)_DIRECTORY|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_\w+"
    r"|MAINPID|MANAGERPID|NOTIFY_SOCKET|LISTEN_\w+|WATCHDOG_\w+|FDSTORE|LOG_NAMESPACE|TRIGGER_\w+|DEBUG_INVOCATION"
)


def releases(instances: Sequence[str], live: bool, gpus: bool) -> HostReleases:
    return HostReleases(
        instances=tuple(_staged(Folders(instance)) for instance in instances),
        servers=_servers(instances) if live else (),
        gpus=inspection.read_gpus()[0] if gpus else (),
    )


def _staged(folders: Folders) -> Releases:
    plans = [host.plan_or_none(folders, name) for name in host.staged(folders)]
    resolved = [host.resolved(folders, plan.release) for plan in plans if plan]
    return Releases(
        instance=folders.instance,
        known_good=host.known_good(folders),
        previous=host.rollback_target(folders),
        plans=tuple(plan for plan in plans if plan),
        resolved=tuple(item for item in resolved if item),
    )


def _servers(instances: Sequence[str]) -> Tuple[LiveServer, ...]:
    table = processes.table()
    mains = occupants.main_pids(table)
    ours = {unit_name(instance): Folders(instance) for instance in instances}
    found = []
    for head in processes.servers(table):
        unit = head.unit if head.unit in ours else occupants.owning_unit(table, head, mains)
        found.append(_live(table, head, unit, ours.get(unit or "")))
    return tuple(found)


def _live(table: Dict[int, Process], head: Process, unit: Optional[str], folders: Optional[Folders]) -> LiveServer:
    process = processes.main_launcher(table, head)
    release = _release(folders) if folders else ""
    environment: Dict[str, str] = {}
    with contextlib.suppress(OSError):
        environment = processes.environment(process.pid)
    secrets = host.secrets(folders, release) if folders and release else {}
    # What a hand gave on the command line outranks what the release's file says.
    secrets.update({name: key for name in ("api-key", "admin-api-key") if (key := process.flag(f"--{name}"))})
    resolved, problem = None, ""
    try:
        info = _ask(table, head, process, secrets.get("api-key", ""))
        known = host.resolved(folders, release) if folders and release else None
        resolved = served(info, release, list(secrets.values()), known)
    except Unanswered as error:
        problem = redact(str(error), list(secrets.values()))
    return LiveServer(
        server=processes.as_server(process, unit),
        release=release,
        python=_python(process, environment),
        environment=_environment(environment, folders, release),
        resolved=resolved,
        problem=problem,
    )


def _release(folders: Folders) -> str:
    """The release whose unit is in force: a swap's candidate, or the committed one."""
    swap = running(folders)
    if swap and folders.candidate_unit.exists():
        return swap.request.release
    return host.known_good(folders) or ""


def _ask(table: Dict[int, Process], head: Process, process: Process, key: str) -> Dict[str, Any]:
    """Its /server_info. The key goes to nobody but the server's own listener. Raises Unanswered."""
    port = process.port
    if port is None:
        raise Unanswered("its command line names no port")
    if not set(processes.listeners(port)) & processes.descendants(table, [head.pid]):
        raise Unanswered(f"it does not listen on port {port} of this host")
    address = client.from_here(process.flag("--host", "127.0.0.1"))
    return Client(client.url(address, port), "", key).server_info()


def _python(process: Process, environment: Mapping[str, str]) -> str:
    word = process.argv[0] if process.argv else ""
    return word if word.startswith("/") else shutil.which(word, path=environment.get("PATH")) or process.exe


def _environment(values: Mapping[str, str], folders: Optional[Folders], release: str) -> Dict[str, str]:
    own = own_environment(values, folders, host.plan_or_none(folders, release) if folders else None)
    hidden = hide_secrets([f"{name}={value}" for name, value in own.items()])
    return dict(word.split("=", 1) for word in hidden)


def own_environment(values: Mapping[str, str], folders: Optional[Folders], plan: Optional[Plan]) -> Dict[str, str]:
    """The variables that are a server's own, with its secrets. plan: of the release that its unit was written for."""
    own = {name: value for name, value in values.items() if not AMBIENT.fullmatch(name)}
    if folders and plan:
        # The guard tells the GPUs' indices of today where the release has UUIDs: the same GPUs.
        for line in files.read_lines(folders.gpu_indices):
            name, _, value = line.partition("=")
            if own.get(name) == value and name in plan.environment:
                own[name] = plan.environment[name]
    return own
