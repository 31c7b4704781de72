"""pyinfra's door to Kernelswap.

pyinfra INVENTORY deploy.py                    every host to the profile that it declares
pyinfra INVENTORY deploy.py --profile NAME     every host to this profile
pyinfra INVENTORY deploy.py --rollback         every host to the commit before its current one
"""

from pathlib import Path

from pyinfra import host

from kernelswap.operations.swap import swap
from kernelswap.planning import plan_host
from roles.host import prepare_host
from roles.monitoring import set_up_monitoring
from roles.server import stage_release

# Faults in models and profiles end the run here; a host that must not be swapped fails here, the others go on.
plan = plan_host(host, library=Path("inventory"), templates=Path("templates"))

if plan.setup:
    prepare_host(plan.setup, **plan.root)

if plan.monitoring:
    set_up_monitoring(plan.monitoring, **plan.root)

for step in host.loop(plan.steps):
    stage_release(step, **plan.root)

for step in host.loop(plan.steps):
    if step.request:
        swap(name="Swap", request=step.request, **plan.root)
