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
"""

from __future__ import annotations

import json
import sys
from typing import List, Optional

from kernelswap.agent import (
    clean,
    evidence,
    files,
    gpus,
    guard,
    host,
    inspection,
    member,
    metrics,
    releases,
    router_host,
    service,
    units,
)
from kernelswap.protocol import DIRTY, Request, decode, encode


def main(argv: Optional[List[str]] = None) -> int:
    command, *words = (sys.argv[1:] if argv is None else argv) or ["help"]
    try:
        if command == "inspect":
            question = json.loads(words[0])
            state = inspection.inspect(
                question["instances"],
                question.get("users", ()),
                question.get("health", False),
                question.get("gpus", False),
                question.get("router", ""),
            )
            print(encode(state))
            return 0
        if command == "drift":
            from kernelswap.agent import config_drift  # no other word needs it

            question = json.loads(words[0])
            print(encode(config_drift.look(question["instances"], question.get("users", ()))))
            return 0
        if command == "measure-drift":
            from kernelswap.agent import config_drift

            names = config_drift.on_host()
            metrics.write_drift(config_drift.look(names, ()))
            for name in names:
                metrics.write(host.Folders(name))
            return 0
        if command == "releases":
            question = json.loads(words[0])
            print(encode(releases.releases(question["instances"], question["running"], question["gpus"])))
            return 0
        if command == "evidence":
            question = json.loads(words[0])
            print(
                encode(evidence.find([host.Folders(name) for name in question["instances"]], question.get("swap", "")))
            )
            return 0
        if command == "swap":
            return service.swap(decode(Request, words[0]))
        if command == "run":
            service.run(words[0], words[1])
            return 0
        if command == "recover":
            service.recover(words[0])
            return 0
        if command == "guard":
            guard.guard(words[0])
            return 0
        if command == "member":
            return member.keep(words[0])
        if command == "router":
            return router_host.wait(words[0])
    except files.Held as held:
        print(f"kernelswap: {held.path} is locked by {service.who_holds(held.pid)}", file=sys.stderr)
        return 1
    except clean.Dirty as dirty:
        print(f"kernelswap: {dirty}: {dirty.todo}", file=sys.stderr)
        return DIRTY
    except (units.UnitError, gpus.GpuError, host.JournalLost) as error:
        print(f"kernelswap: {error}", file=sys.stderr)
        return 1
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
