"""`kernelswap status --drift` on real hosts: each kind of drift is planted, found and named; a clean host has none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import MODEL, Project, count_sessions, sessions
from promtool import check

pytestmark = pytest.mark.xdist_group("drift")

KEY = "glm-s3cret-key"
COLLECTOR = "/var/lib/prometheus/node-exporter"
LAUNCH = "/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --port"
UNIT = "/etc/systemd/system/sglang-main.service"
GOOD = "/etc/kernelswap/main/known-good"
UP = "for _ in $(seq 100); do curl -sf http://127.0.0.1:{port}/health && break; sleep 0.1; done"
HAND_MADE = (
    f"[Service]\nEnvironment=PYTHONPATH=/opt/standin\nExecStart={LAUNCH} 30000\n[Install]\nWantedBy=multi-user.target\n"
)
COMPOSE = "services:\n  glm:\n    image: lmsysorg/sglang:v0.5.23\n    restart: unless-stopped\n"


@pytest.fixture(scope="module")
def pair(lab: Lab) -> Sequence[Host]:
    """Two hosts that no other test has touched, each with a GPU."""
    hosts = lab.up(len(lab.hosts) + 2)[-2:]
    for host in hosts:
        host.write("/etc/nvml-sim.conf", "gpus=1\n")
    return hosts


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, pair: Sequence[Host]) -> Iterator[Project]:
    """Both serve, with a key and metrics."""
    project = Project(tmp_path_factory.mktemp("ops"), [(host, {"metrics": COLLECTOR}) for host in pair]).write()
    model = MODEL.replace("{device: cpu}", "{}").replace("clean: 20", "clean: 20, nvml: 10")
    project.model(f"{model}\ngpus: [0]\nsecrets: {{api-key: {{env: GLM_KEY}}}}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLM_KEY", KEY)
        assert project.deploy("-y").code == 0
        yield project


def drift(project: Project, *words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the findings by host."""
    done = project.kernelswap("status", "inventory/hosts.py", "--drift", "--json", *words)
    assert KEY not in done.output
    return done.code, {host["host"]: host["findings"] for host in json.loads(done.output)}


def is_clean(project: Project) -> None:
    done = project.kernelswap("status", "inventory/hosts.py", "--drift")
    assert "as declared and as committed" in done
    assert "expected:" not in done
    assert done.code == 0


# What is done to a host, what undoes it, and the findings: kind and words of it.
PLANTED: dict[str, tuple[str, str, list[tuple[str, str]]]] = {
    "files": (
        f"""
printf '{HAND_MADE}' >/etc/systemd/system/glm.service; systemctl -q enable glm
printf '{HAND_MADE}' >/etc/systemd/system/nightly.service
printf '[Timer]\nOnCalendar=daily\n[Install]\nWantedBy=timers.target\n' >/etc/systemd/system/nightly.timer
systemctl -q enable --now nightly.timer
echo '@reboot root cd /srv && PYTHONPATH=/opt/standin {LAUNCH} 30000' >/etc/cron.d/glm
mkdir -p /var/spool/cron/crontabs; printf '# mine\\n@daily pgrep -f sglang.launch_server || systemctl start glm\\n' \\
  >/var/spool/cron/crontabs/ops
mkdir -p /opt/glm; printf '{COMPOSE}' >/opt/glm/docker-compose.yml
printf '#!/bin/sh\\n{LAUNCH} 31000 &\\n' >/etc/rc.local; chmod 755 /etc/rc.local
units=/home/ops/.config/systemd/user; mkdir -p $units/default.target.wants
printf '{HAND_MADE}' >$units/glm.service; ln -s ../glm.service $units/default.target.wants/
sed -i 's/"ready":60.0/"ready":7.0/' {GOOD}/plan.json
echo '# edited' >>/etc/systemd/system/kernelswap-recover@.service
chmod 644 {GOOD}/secrets.yaml
mkdir -p {UNIT}.d; printf '[Service]\\nNice=5\\n' >{UNIT}.d/override.conf
""",
        f"""
rm -r {UNIT}.d /opt/glm /home/ops/.config; systemctl -q disable glm
systemctl -q disable --now nightly.timer; rm /etc/systemd/system/{{glm.service,nightly.*}} /etc/cron.d/glm
rm /var/spool/cron/crontabs/ops /etc/rc.local; chmod 600 {GOOD}/secrets.yaml; systemctl daemon-reload
sed -i 's/"ready":7.0/"ready":60.0/' {GOOD}/plan.json
sed -i '/# edited/d' /etc/systemd/system/kernelswap-recover@.service
""",
        [
            ("boot-script", "/etc/rc.local:2"),
            ("compose", "/opt/glm/docker-compose.yml, service glm"),
            ("cron", "/etc/cron.d/glm:1"),
            ("cron", "/var/spool/cron/crontabs/ops:2"),
            ("drop-in", f"{UNIT}.d/override.conf"),
            ("hand-made-unit", "glm.service"),
            ("hand-made-unit", "started by nightly.timer"),
            ("not-reloaded", "sglang-main.service"),
            ("secrets", "secrets.yaml"),
            ("setup", "kernelswap-recover@.service"),
            ("staged", "plan.json"),
            ("user-unit", "/home/ops/.config/systemd/user/glm.service"),
        ],
    ),
    "what runs": (
        f"""
sed -i 's/--moe-runner-backend auto/--moe-runner-backend triton/' {UNIT}; sed -i '/^User=/a Environment=MINE=1' {UNIT}
systemctl -q disable sglang-main; systemctl daemon-reload; systemctl restart sglang-main
cp -a /opt/standin/sglang/__init__.py /run/; sed -i s/0.5.23/0.5.24/ /opt/standin/sglang/__init__.py
printf 'gpus=1\\ndriver=590.48.01\\n' >/etc/nvml-sim.conf
PYTHONPATH=/opt/standin setsid {LAUNCH} 31000 >/dev/null 2>&1 </dev/null & echo $! >/run/stray
{UP.format(port=31000)}; {UP.format(port=30000)}
""",
        f"""
kill -INT $(cat /run/stray); cp {GOOD}/sglang-main.service {UNIT}; systemctl daemon-reload
systemctl -q enable sglang-main; cp -a /run/__init__.py /opt/standin/sglang/; echo gpus=1 >/etc/nvml-sim.conf
systemctl restart sglang-main
{UP.format(port=30000)}
""",
        [
            ("argv", "--moe-runner-backend triton"),
            ("driver", "590.48.01"),
            ("engine", "SGLang 0.5.24 is installed"),
            ("environment", "MINE=1"),
            ("not-enabled", "sglang-main.service"),
            ("resolved", "moe_runner_backend"),
            ("server", "no unit"),
            ("unit", "--moe-runner-backend triton"),
        ],
    ),
    "stopped and masked, with another in its place": (
        f"""
systemctl stop sglang-main; systemctl -q mask --runtime sglang-main
sed -i 's/: "/: "x/' {GOOD}/secrets.yaml
systemd-run -q --unit=by-hand --setenv=PYTHONPATH=/opt/standin {LAUNCH} 30000
{UP.format(port=30000)}
""",
        f"""
systemctl stop by-hand; systemctl -q unmask --runtime sglang-main; sed -i 's/: "x/: "/' {GOOD}/secrets.yaml
systemctl start sglang-main
{UP.format(port=30000)}
""",
        [
            ("hand-made-unit", "by-hand.service"),
            ("masked", "/run/systemd/system/sglang-main.service"),
            ("not-running", "sglang-main.service"),
            ("port", "SGLang of root in no unit on port 30000, which is instance main's"),
            ("port", "somebody else listens too"),
            ("secrets", "other secrets"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_each_kind_of_drift_is_found_and_named(project: Project, pair: Sequence[Host], name: str) -> None:
    plant, undo, wanted = PLANTED[name]
    host, other = pair
    host.run(plant)
    try:
        code, found = drift(project)
    finally:
        host.run(undo)
    told = [finding for finding in found[host.name] if not finding["unknown"]]
    assert sorted(finding["kind"] for finding in told) == [kind for kind, _ in wanted]
    for kind, words in wanted:
        assert any(kind == each["kind"] and words in " ".join(map(str, each.values())) for each in told), words
    assert all(finding["todo"] for finding in told)
    assert (code, found[other.name]) == (1, [])
    is_clean(project)


def test_the_same_drift_of_both_is_told_once_in_one_remote_command_of_each(
    project: Project, pair: Sequence[Host]
) -> None:
    count_sessions(pair[0])
    before = sessions(pair[0])
    project.profile("plain", "flags: {moe-runner-backend: triton}")
    done = project.kernelswap("status", "inventory/hosts.py", "--drift")
    project.profile("plain", "flags: {moe-runner-backend: auto}")
    assert sessions(pair[0]) - before == 2  # the last question is one, too
    first, second = (int(host.name.removeprefix("gpu")) for host in pair)
    assert f"gpu[{first}-{second}]: release: instance main: /etc/kernelswap/main/known-good" in done
    assert "found: standin with plain; to the declared one: moe-runner-backend: auto -> triton" in done
    assert done.code == 1
    is_clean(project)


def test_an_unreachable_host_is_unknown(project: Project, pair: Sequence[Host]) -> None:
    pair[1].run("systemctl stop ssh.socket ssh.service 2>/dev/null; true", check=False)
    try:
        code, found = drift(project)
    finally:
        pair[1].reboot()
    assert [(finding["kind"], finding["unknown"]) for finding in found[pair[1].name]] == [("unreachable", True)]
    assert (code, found[pair[0].name]) == (2, [])


def test_metrics_are_written_at_the_end_of_a_swap_and_by_the_timer(project: Project, pair: Sequence[Host]) -> None:
    host = pair[0]
    assert host.output("systemctl is-enabled kernelswap-drift.timer; systemctl is-active kernelswap-drift.timer")
    crash = project.deploy("--limit", host.name, "--profile", "crash", "-y")
    assert crash.code == 1
    told = host.read(f"{COLLECTOR}/kernelswap-main.prom")
    assert 'kernelswap_last_swap_outcome{sglang_instance="main",outcome="rolled-back"} 1.0' in told
    assert 'kernelswap_swaps_total{sglang_instance="main",outcome="committed"} 1.0' in told
    assert 'kernelswap_release_info{sglang_instance="main",release="plain-' in told
    host.run(f"mkdir -p {UNIT}.d; echo [Service] >{UNIT}.d/x.conf; systemctl start kernelswap-drift.service")
    drifted = host.read(f"{COLLECTOR}/kernelswap-drift.prom")
    host.run(f"rm -r {UNIT}.d; systemctl daemon-reload; systemctl start kernelswap-drift.service")
    clean = host.read(f"{COLLECTOR}/kernelswap-drift.prom")
    assert 'kernelswap_drift_findings{sglang_instance="main"} 2.0' in drifted
    assert 'kernelswap_drift_findings{sglang_instance="main"} 0.0' in clean
    assert 'kernelswap_drift_unknown{sglang_instance="main"} 0.0' in clean
    assert KEY not in told + drifted
    assert check("check", "metrics", text=told + clean) == ""
    assert "Starting operation" not in project.deploy("-y")

    project.declare([(each, {}) for each in pair])
    assert project.deploy("-y").code == 0
    left = f"ls -d /etc/kernelswap/metrics /etc/systemd/system/kernelswap-drift.timer {COLLECTOR}/*"
    assert host.run(left, check=False).stdout == ""
    assert "Starting operation" not in project.deploy("-y")


@pytest.mark.exhaustive
def test_a_clean_fleet_of_twenty_has_no_drift(lab: Lab, tmp_path: Path) -> None:
    hosts = lab.up(len(lab.hosts) + 20)[-20:]
    project = Project(tmp_path, [(host, {}) for host in hosts]).write()
    assert project.deploy("-y").code == 0
    is_clean(project)
