"""The rendered unit with the real SGLang on a lab host: it serves unprivileged, and keeps its key to itself."""

import json
from collections.abc import Iterator

import pytest
from test_quoting import ROOT, Remote, put

from kernelswap.profile import load_library
from kernelswap.render import Release, render
from kernelswap.spec import server_spec

pytestmark = pytest.mark.lab

KEY = "key-that-nobody-may-see"
PORT = 31999
READY = f"curl -s -o /dev/null -f -m 5 http://127.0.0.1:{PORT}/health"


def get(path: str, header: str = "") -> str:
    return f"curl -s -m 20 {header} -w '\\n%{{http_code}}' http://127.0.0.1:{PORT}{path}"


@pytest.fixture(scope="module")
def remote() -> Remote:
    return Remote()


@pytest.fixture(scope="module")
def served(remote: Remote) -> Iterator[Release]:
    overrides = {"user": "nobody", "port": PORT, "secrets": {"api-key": {"env": "KEY"}}}
    spec = server_spec(load_library(ROOT / "inventory"), "unit-test", "tiny", "torch-native", overrides)
    release = render(spec, {"api-key": KEY}, "00" * 32, ROOT / "templates")
    assert release.secrets is not None
    unit, folder = release.plan.unit, f"/run/unit-test/{release.name}"
    files = {f"unit-test/{release.name}/{name}": text for name, text in release.files.items()}
    put(remote, files | {f"unit-test/{release.name}/secrets.yaml": release.secrets.reveal()})
    header = f"unit-test/{release.name}/header"
    # The agent is not part of this test; its folder below /etc stands under /run instead.
    text = release.files[unit].replace("/etc/kernelswap/unit-test/releases/", "/run/unit-test/")
    drop_in = "[Service]\nExecStartPre=\nRestart=no\n"
    put(remote, {f"systemd/system/{unit}": text, f"systemd/system/{unit}.d/test.conf": drop_in})
    put(remote, {header: f"Authorization: Bearer {KEY}\n"})
    ready = f"for i in $(seq 180); do {READY} && exit 0; systemctl is-active -q {unit} || exit 1; sleep 1; done"
    try:
        remote.run(f"chmod 600 {folder}/secrets.yaml; systemctl daemon-reload; systemctl start {unit}")
        remote.run(ready, seconds=240)
        yield release
    finally:
        remote.run(
            f"systemctl stop {unit}; systemctl reset-failed {unit} 2>/dev/null;"
            f" rm -rf /run/systemd/system/{unit}* /run/unit-test /var/cache/sglang/unit-test; systemctl daemon-reload"
        )


def test_it_answers_those_who_know_the_key(remote: Remote, served: Release) -> None:
    header = f"-H @/run/unit-test/{served.name}/header"
    assert remote.run(get("/v1/models")).endswith(b"\n401")
    body, _, code = remote.run(get("/v1/models", header)).rpartition(b"\n")
    assert (code, json.loads(body)["data"][0]["id"]) == (b"200", "tiny")


def test_the_key_is_in_no_log_and_no_command_line(remote: Remote, served: Release) -> None:
    group = f"/sys/fs/cgroup/system.slice/{served.plan.unit}/cgroup.procs"
    processes = f"for pid in $(cat {group}); do cat /proc/$pid/cmdline /proc/$pid/environ; done"
    shown = remote.run(f"journalctl -b --no-pager -u {served.plan.unit}; {processes}")
    assert b"sglang.launch_server" in shown
    assert KEY.encode() not in shown


def test_its_log_goes_on_with_the_name_of_the_process(remote: Remote, served: Release) -> None:
    log = remote.run(f"journalctl -b --no-pager -o cat -u {served.plan.unit}").decode()
    assert " Process-1] Load weight begin" in log
    assert "The server is fired up and ready to roll!" in log


def test_it_runs_unprivileged_and_stops_at_once(remote: Remote, served: Release) -> None:
    unit = served.plan.unit
    pid = remote.run(f"systemctl show --value -p MainPID {unit}").decode().strip()
    status = dict(
        line.split(":\t", 1) for line in remote.run(f"cat /proc/{pid}/status").decode().splitlines() if ":\t" in line
    )
    assert (status["NoNewPrivs"], int(status["CapEff"], 16), int(status["CapBnd"], 16)) == ("1", 0, 0)
    stop = f"start=$(date +%s%N); systemctl stop {unit}; echo $(( ($(date +%s%N) - start) / 1000000 ))"
    assert int(remote.run(stop)) < 4000, "milliseconds; SIGTERM would be noticed after 5 s only"
    assert remote.run(f"systemctl show --value -p Result {unit}") == b"success\n"
