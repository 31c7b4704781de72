"""Two servers of one host: what happens to one is nothing to the other."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import MODEL, Project, unused

pytestmark = pytest.mark.xdist_group("converge")

LEFT, RIGHT = 30000, 30001


@pytest.fixture
def host(lab: Lab) -> Host:
    host = unused(lab)
    host.write("/etc/nvml-sim.conf", "gpus=2\n")
    return host


@pytest.fixture
def project(tmp_path: Path, host: Host) -> Project:
    project = Project(tmp_path, declared(host, "plain")).write()
    project.model(MODEL.replace("clean: 20", "clean: 20, stop: 6"))
    project.profile("stubborn", "environment: {STANDIN_FAULT: hangs-on-stop}")
    return project


def declared(host: Host, profile: str) -> list[tuple[Host, dict[str, Any]]]:
    """Two instances, the left one with this profile."""
    left = {"profile": profile, "port": LEFT, "gpus": [0]}
    right = {"profile": "plain", "port": RIGHT, "gpus": [1]}
    return [(host, {"instances": {"left": left, "right": right}})]


@contextmanager
def load(host: Host) -> Iterator[list[str]]:
    """Four clients of the right one, ten requests a second each; what was not the right answer is listed."""
    stop = threading.Event()
    wrong: list[str] = []
    right = [0]

    def ask() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "What is 2+2?"}]}).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not stop.wait(0.1):
            try:
                url = f"http://{host.address}:{RIGHT}/v1/chat/completions"
                with opener.open(url, data=body, timeout=30) as response:
                    text = json.load(response)["choices"][0]["message"]["content"]
                right[0] += text == "2+2 is 4."
                if text != "2+2 is 4.":
                    wrong.append(text)
            except OSError as error:
                wrong.append(repr(error))

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        yield wrong
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert right[0] > 20


def processes(host: Host, instance: str) -> str:
    """Ids and start times of all processes of an instance."""
    group = f"$(systemctl show -P ControlGroup sglang-{instance})/cgroup.procs"
    pids = f"$(cat /sys/fs/cgroup/{group} /sys/fs/cgroup/systemd/{group} 2>/dev/null | sort -u)"
    return host.output(f"ps -o pid=,lstart= -p {pids}")


def test_a_swap_leaves_the_other_instance_alone_under_load(project: Project, host: Host) -> None:
    assert project.deploy("-y").code == 0
    before = processes(host, "right")
    assert len(before.splitlines()) == 3
    with load(host) as wrong:
        for profile, end, code in (
            ("stubborn", "committed stubborn-", 0),
            ("crash", "ROLLED BACK from crash-", 1),  # and what comes back hangs on stop, so it was killed
            ("triton", "committed triton-", 0),
        ):
            project.declare(declared(host, profile))
            ended = project.deploy("-y")
            assert ended.code == code
            assert end in ended
            assert "right: unchanged: plain-" in ended
            assert processes(host, "right") == before
    assert wrong == []
    # A stray on the left one's GPU and port is the left one's affair alone.
    host.run("systemctl stop sglang-left")
    stray = f"/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --port {LEFT}"
    environment = "PYTHONPATH=/opt/standin CUDA_VISIBLE_DEVICES=0"
    host.output(f"{environment} systemd-run --scope {stray} >/dev/null 2>&1 </dev/null & sleep 2")
    with load(host) as wrong:
        adopted = project.deploy("--adopt", "-y")
    assert adopted.code == 0
    assert "left: swap: " in adopted
    assert wrong == []
    assert processes(host, "right") == before
    assert "sglang.launch_server" not in host.output("systemctl list-units --type scope --no-legend")
