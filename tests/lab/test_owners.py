"""What else holds the port of an instance: a real Docker's container, another engine, a server that comes back."""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest
from labhost import Host, Lab
from project import MODEL, Project, release, unused

pytestmark = pytest.mark.xdist_group("owners")

WORDS = "/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --port 30000"
# A container of the host's own Python: its image holds only links into what is mounted from the host.
IMAGE = """
mkdir -p /root/image/tmp /root/image/etc; cd /root/image
for name in bin lib lib64 sbin; do ln -sfn usr/$name $name; done
tar c . | docker import - sglang:lab
"""
RUN = (
    "docker run -d --name glm --restart=always --network=host -v /usr:/usr:ro -v /opt:/opt:ro -v /srv:/srv:ro "
    f"-e PYTHONPATH=/opt/standin sglang:lab {WORDS}"
)
DOCKERD = "dockerd --iptables=false --ip6tables=false --bridge=none --storage-driver=vfs --ip-forward=false"
WAIT = "for _ in $(seq 100); do curl -sf http://127.0.0.1:30000/health && exit; sleep 0.2; done; exit 1"


@pytest.fixture
def host(lab: Lab) -> Host:
    return unused(lab)


@pytest.fixture
def project(tmp_path: Path, host: Host) -> Project:
    return Project(tmp_path, [(host, {})]).write()


def install_docker(host: Host, folder: Path) -> None:
    """Docker from the packages of this machine's system, which must be that of the hosts."""
    if platform.freedesktop_os_release().get("VERSION_CODENAME") != "bookworm":
        pytest.skip("Docker for the hosts comes from a Debian 12")
    subprocess.run(["apt-get", "-qq", "download", "docker.io", "containerd", "runc"], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        files = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True).stdout
        host.run("tar xf - -C / --keep-directory-symlink", data=files)
    host.run(f"systemd-run --unit=dockerd --property=Delegate=yes {DOCKERD}; until docker info; do sleep 0.2; done")
    host.run(IMAGE)


def policy(host: Host) -> str:
    return host.output("docker inspect -f '{{.HostConfig.RestartPolicy.Name}} {{.State.Running}}' glm")


def test_a_container_is_named_adopted_and_brought_back(project: Project, host: Host, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    install_docker(host, tmp_path / "packages")
    host.run(f"{RUN}; {WAIT}")

    refused = project.deploy("-y")
    assert refused.code == 1
    assert "in docker container glm (" in refused
    assert "image sglang:lab, since 2" in refused
    assert "--adopt" in refused
    assert policy(host) == "always true"

    crash = project.deploy("--adopt", "--profile", "crash", "-y")
    assert crash.code == 1
    assert "docker container glm (" in crash
    assert "serves again" in crash
    assert policy(host) == "always true"
    host.run(WAIT)

    assert project.deploy("--adopt", "-y").code == 0
    assert release(host).startswith("plain-")
    assert policy(host) == "no false"


def test_what_is_no_sglang_is_ended_only_where_the_inventory_says_so(project: Project, host: Host) -> None:
    host.run("systemd-run --scope python3 -m http.server 30000 >/dev/null 2>&1 </dev/null & sleep 2")
    pid = host.output("pgrep -f '^/usr/bin/python3 -m http.server|^python3 -m http.server'")
    refused = project.deploy("--adopt", "-y")
    assert refused.code == 1
    assert f"port 30000 is taken by pid {pid} of root, since " in refused
    assert "set `end-foreign: true` to have it ended" in refused
    assert host.output(f"test -d /proc/{pid} && echo alive") == "alive"

    project.model(f"{MODEL}\nend-foreign: true")
    assert project.deploy("-y").code == 0
    assert host.output(f"test -d /proc/{pid} || echo gone") == "gone"
    assert release(host).startswith("plain-")


def test_a_foreign_unit_comes_back_with_a_failed_swap(project: Project, host: Host) -> None:
    host.write(
        "/etc/systemd/system/other.service",
        "[Service]\nExecStart=/usr/bin/python3 -m http.server 30000\nRestart=always\n"
        "[Install]\nWantedBy=multi-user.target\n",
    )
    host.run("systemctl enable --now other.service; sleep 1")
    project.model(f"{MODEL}\nend-foreign: true")
    assert project.deploy("--profile", "crash", "-y").code == 1
    assert host.output("systemctl is-active other.service; systemctl is-enabled other.service") == "active\nenabled"
    assert project.deploy("-y").code == 0
    assert host.run("systemctl is-active other.service", check=False).stdout == "inactive\n"


def test_a_stray_of_a_transient_unit_is_ended_with_it(project: Project, host: Host) -> None:
    unit = "--unit=glm --property=Restart=always --property=RestartSec=100ms --setenv=PYTHONPATH=/opt/standin"
    host.run(f"systemd-run {unit} {WORDS}; {WAIT}")
    assert project.deploy("--adopt", "-y").code == 0
    assert release(host).startswith("plain-")
    assert host.run("systemctl is-active glm.service", check=False).stdout == "inactive\n"


def test_a_stray_that_a_loop_starts_again_is_told_with_who_does_it(project: Project, host: Host) -> None:
    host.write("/root/loop.sh", f"export PYTHONPATH=/opt/standin\nwhile true; do\n  {WORDS}\n  sleep 0.1\ndone\n")
    host.run(f"systemd-run --scope bash /root/loop.sh >/dev/null 2>&1 </dev/null & {WAIT}")
    failed = project.deploy("--adopt", "-y")
    assert failed.code == 1
    assert "ROLLED BACK" in failed  # by the loop itself: it answers again
    # By the clean step, or by the guard if the loop was just asleep.
    assert re.search(r"started (again after the stop )?by pid \d+: (/usr/bin/)?bash /root/loop.sh", failed.output)
