"""The agent's command line; people need none of it.

inspect JSON        print the host's state as one line of JSON
drift JSON          print in what the host is not as it should be, as one line of JSON
measure-drift       write that and the rest of the metrics, as the drift timer has it
releases JSON       print its releases, and the servers that run, as one line of JSON
evidence JSON       print what was kept of one swap as one line of JSON
swap JSON           start or join a swap and follow it
run INSTANCE ID     what the transient service does
recover INSTANCE    close an open swap after a reboot
member INSTANCE     keep an instance in its routers
router URL          wait until the host's router lists its workers
guard INSTANCE      prove the host clean before a start; exit 3 if it was seen not to be
compile             keep this agent's bytecode beside its file, so that it starts in a quarter of the time
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

from kernelswap.agent import host, units
from kernelswap.protocol import DIRTY, Request, decode, encode

# Loading code is most of what a question costs a host, so each command imports what it needs.


def main(argv: Optional[List[str]] = None) -> int:
    command, *words = (sys.argv[1:] if argv is None else argv) or ["help"]
    try:
        if command in ("inspect", "drift", "releases", "evidence"):
            print(encode(_answer(command, json.loads(words[0]))))
            return 0
        if command in ("swap", "run", "recover"):
            return _work(command, words)
        if command == "guard":
            return _guard(words[0])
        if command == "measure-drift":
            return _measure_drift()
        if command == "member":
            from kernelswap.agent import member

            return member.keep(words[0])
        if command == "router":
            from kernelswap.agent import router_host

            return router_host.wait(words[0])
        if command == "compile":
            return _compile()
    except (units.UnitError, host.JournalLost) as error:
        return _failed(str(error))
    print(__doc__, file=sys.stderr)
    return 2


def _answer(command: str, question: Dict[str, Any]) -> Any:
    instances = question["instances"]
    if command == "inspect":
        from kernelswap.agent import inspection

        wanted = question.get("users", ()), question.get("health", False), question.get("gpus", False)
        return inspection.inspect(instances, *wanted, question.get("router", ""))
    if command == "drift":
        from kernelswap.agent import config_drift

        return config_drift.look(instances, question.get("users", ()))
    if command == "releases":
        from kernelswap.agent import releases

        return releases.releases(instances, question["running"], question["gpus"])
    from kernelswap.agent import evidence

    return evidence.find([host.Folders(name) for name in instances], question["swap"])


def _work(command: str, words: List[str]) -> int:
    from kernelswap.agent import files, gpus, service

    try:
        if command == "swap":
            return service.swap(decode(Request, words[0]))
        if command == "run":
            service.run(words[0], words[1])
        else:
            service.recover(words[0])
    except files.Held as held:
        return _failed(f"{held.path} is locked by {service.who_holds(held.pid)}")
    except gpus.GpuError as error:
        return _failed(str(error))
    return 0


def _guard(instance: str) -> int:
    from kernelswap.agent import clean, gpus, guard

    try:
        guard.guard(instance)
    except clean.Dirty as dirty:
        _failed(f"{dirty}: {dirty.todo}")
        return DIRTY
    except gpus.GpuError as error:
        return _failed(str(error))
    return 0


def _measure_drift() -> int:
    from kernelswap.agent import config_drift, metrics

    names = config_drift.on_host()
    metrics.write_drift(config_drift.look(names, ()))
    for name in names:
        metrics.write(host.Folders(name))
    return 0


def _compile() -> int:
    from kernelswap.agent import compiled

    bytecode, archive, *_ = map(Path, sys.path)
    compiled.keep(archive, bytecode)
    return 0


def _failed(why: str) -> int:
    print(f"kernelswap: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
