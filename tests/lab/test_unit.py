"""The rendered unit with the real SGLang on a lab host: it serves unprivileged, and keeps its key to itself."""

import json
from collections.abc import Iterator

import pytest
from labhost import ROOT, Lab

from kernelswap.library import load_library
from kernelswap.render import Release, release_folder, render
from kernelswap.spec import server_spec

KEY = "key-that-nobody-may-see"
PORT = 31999
READY = f"curl -s -o /dev/null -f -m 5 http://127.0.0.1:{PORT}/health"


def get(path: str, header: str = "") -> str:
    return f"curl -s -m 20 {header} -w '\\n%{{http_code}}' http://127.0.0.1:{PORT}{path}"


@pytest.fixture(scope="module")
def served(lab: Lab) -> Iterator[Release]:
    overrides = {"user": "nobody", "port": PORT, "secrets": {"api-key": {"env": "KEY"}}}
    spec = server_spec(load_library(ROOT / "inventory"), "unit-test", "tiny", "torch-native", overrides)
    release = render(spec, {"api-key": KEY}, "00" * 32, ROOT / "templates")
    assert release.secrets is not None
    unit, folder = release.plan.unit, f"/run/unit-test/{release.name}"
    host = lab.hosts[0]
    for name, text in release.files.items():
        host.write(f"{folder}/{name}", text)
    host.write(f"{folder}/secrets.yaml", release.secrets.reveal(), mode=0o600)
    host.write(f"{folder}/header", f"Authorization: Bearer {KEY}\n", mode=0o600)
    # The agent is no part of this test, and the releases' folder stands under /run.
    host.write(
        f"/run/systemd/system/{unit}", release.files[unit].replace(release_folder("unit-test", release.name), folder)
    )
    host.write(f"/run/systemd/system/{unit}.d/test.conf", "[Service]\nExecStartPre=\nRestart=no\n")
    ready = f"for i in $(seq 180); do {READY} && exit 0; systemctl is-active -q {unit} || exit 1; sleep 1; done"
    try:
        host.run(f"systemctl daemon-reload; systemctl start {unit}")
        host.run(ready, timeout=240)
        yield release
    finally:
        host.run(
            f"systemctl stop {unit}; systemctl reset-failed {unit} 2>/dev/null;"
            f" rm -rf /run/systemd/system/{unit}* /run/unit-test /var/cache/sglang/unit-test; systemctl daemon-reload"
        )


def test_it_answers_those_who_know_the_key(lab: Lab, served: Release) -> None:
    header = f"-H @/run/unit-test/{served.name}/header"
    assert lab.hosts[0].output(get("/v1/models")).endswith("\n401")
    body, _, code = lab.hosts[0].output(get("/v1/models", header)).rpartition("\n")
    assert (code, json.loads(body)["data"][0]["id"]) == ("200", "tiny")


def test_the_key_is_in_no_log_and_no_command_line(lab: Lab, served: Release) -> None:
    group = f"/sys/fs/cgroup/system.slice/{served.plan.unit}/cgroup.procs"
    processes = f"for pid in $(cat {group}); do cat /proc/$pid/cmdline /proc/$pid/environ; done"
    shown = lab.hosts[0].output(f"journalctl -b --no-pager -u {served.plan.unit}; {processes}")
    assert "sglang.launch_server" in shown
    assert KEY not in shown


def test_its_log_goes_on_with_the_name_of_the_process(lab: Lab, served: Release) -> None:
    log = lab.hosts[0].output(f"journalctl -b --no-pager -o cat -u {served.plan.unit}")
    assert " Process-1] Load weight begin" in log
    assert "The server is fired up and ready to roll!" in log


def test_it_runs_unprivileged_and_stops_at_once(lab: Lab, served: Release) -> None:
    unit = served.plan.unit
    pid = lab.hosts[0].output(f"systemctl show --value -p MainPID {unit}")
    status = dict(
        line.split(":\t", 1) for line in lab.hosts[0].output(f"cat /proc/{pid}/status").splitlines() if ":\t" in line
    )
    assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapBnd"], 16)) == ("1", 0, 0)
    stop = f"start=$(date +%s%N); systemctl stop {unit}; echo $(( ($(date +%s%N) - start) / 1000000 ))"
    assert int(lab.hosts[0].output(stop)) < 4000, "milliseconds; SIGTERM would be noticed after 5 s only"
    assert lab.hosts[0].output(f"systemctl show --value -p Result {unit}") == "success"
