"""pyinfra's door to Kernelswap.

pyinfra INVENTORY deploy.py                    every host to the profile that it declares
pyinfra INVENTORY deploy.py --profile NAME     every host to this profile
pyinfra INVENTORY deploy.py --rollback         every host to the commit before its current one
"""

from pathlib import Path

from pyinfra import host

from kernelswap.operations.swap import swap
from kernelswap.planning import plan_host
from kernelswap.router_planning import plan_router
from roles.host import join_routers, prepare_host
from roles.monitoring import set_up_monitoring
from roles.router import run_router
from roles.server import stage_releases

# The whole fleet is read and its plan shown here. Faults in what people wrote end the run; so do more hosts that must
# not be swapped than the rollout allows.
plan = plan_host(host, library=Path("inventory"), templates=Path("templates"))
router = plan_router(host, templates=Path("templates"))

if router:
    run_router(router, **router.root)

if plan.setup:
    prepare_host(plan.setup, **plan.root)

if plan.monitoring:
    set_up_monitoring(plan.monitoring, **plan.root)

if plan.steps:
    stage_releases(plan.steps, **plan.root)

if plan.setup.members:
    join_routers(plan.setup, **plan.root)

# Each host when its wave comes; after the stop none.
if plan.turn:
    swap(name="Swap", turn=plan.turn, **plan.root)
