"""Put releases on the host. It changes nothing that runs: a release is only read by the swap that makes it current."""

from collections.abc import Iterable

from pyinfra.api import deploy

from kernelswap.operations.content import File, place
from kernelswap.planning import Step
from kernelswap.protocol import CONFIG_ROOT, TRAFFIC_FILE
from kernelswap.render import release_folder


@deploy("Stage the releases")
def stage_releases(steps: Iterable[Step]) -> None:
    files = []
    for step in steps:
        if step.traffic:
            files.append(File(f"{CONFIG_ROOT}/{step.instance}/{TRAFFIC_FILE}", step.traffic, mode=0o600))
        for name in step.stage if step.release else ():
            path = f"{release_folder(step.instance, step.release.name)}/{name}"
            if name in step.release.files:
                files.append(File(path, step.release.files[name]))
            elif step.release.secrets:
                files.append(File(path, step.release.secrets, mode=0o600))
    place(name="Stage the releases", files=files)
