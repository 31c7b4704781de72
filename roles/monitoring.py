"""Where the agent writes its metrics, and the timer that looks for drift. Alert rules: monitoring/alerts.yml."""

import shlex

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.operations import server, systemd

from kernelswap.operations.content import place
from kernelswap.planning import Monitoring
from kernelswap.protocol import DRIFT_UNITS, METRICS_LINK


@deploy("Set up monitoring")
def set_up_monitoring(wanted: Monitoring) -> None:
    timer = DRIFT_UNITS[1]
    if wanted.left:  # else what they said last would be scraped for ever
        server.shell(name="Remove the old metrics", commands=[f"rm -f {shlex.quote(wanted.left)}/kernelswap-*.prom"])
    if not wanted.folder:
        systemd.service(name="Stop the drift timer", service=timer, running=False, enabled=False)
        paths = [METRICS_LINK, *(f"/etc/systemd/system/{unit}" for unit in DRIFT_UNITS)]
        server.shell(name="Write no metrics", commands=[f"rm -f {shlex.join(paths)}", "systemctl daemon-reload"])
        return
    target = shlex.quote(wanted.folder)
    commands = [f"install -d -m 755 {target}", f"ln -sfn {target} {METRICS_LINK}"]
    server.shell(name="Say where metrics go", commands=commands)
    for name, text in host.loop(list(wanted.units.items())):
        place(name=f"Install {name}", path=f"/etc/systemd/system/{name}", content=text.encode(), mode="644")
    systemd.service(name="Start the drift timer", service=timer, running=True, enabled=True, daemon_reload=True)
