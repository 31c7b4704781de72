"""Where the agent writes its metrics, and the timer that looks for drift. Alert rules: monitoring/alerts.yml."""

import shlex

from pyinfra.api import deploy
from pyinfra.operations import server

from kernelswap.host_setup import Monitoring
from kernelswap.operations.content import File, place
from kernelswap.protocol import DRIFT_UNITS, METRICS_LINK

ETC = "/etc/systemd/system"


@deploy("Set up monitoring")
def set_up_monitoring(wanted: Monitoring) -> None:
    timer = DRIFT_UNITS[1]
    commands = []
    if wanted.left:  # else what they said last would be scraped for ever
        commands.append(f"rm -f {shlex.quote(wanted.left)}/kernelswap-*.prom")
    if wanted.folder:
        place(
            name="Install the drift timer", files=[File(f"{ETC}/{name}", text) for name, text in wanted.units.items()]
        )
        target = shlex.quote(wanted.folder)
        commands += [f"install -d -m 755 {target}", f"ln -sfn {target} {METRICS_LINK}"]
        commands += ["systemctl daemon-reload", f"systemctl enable --quiet --now {timer}"]
    else:
        paths = [METRICS_LINK, *(f"{ETC}/{unit}" for unit in DRIFT_UNITS)]
        commands += [
            f"systemctl disable --quiet --now {timer}",
            f"rm -f {shlex.join(paths)}",
            "systemctl daemon-reload",
        ]
    server.shell(name="Say where metrics go", commands=[" && ".join(commands)])
