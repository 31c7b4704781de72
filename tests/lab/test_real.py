"""The main job with the real SGLang, by the literal commands, as the user whose sudo wants a password."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from labhost import ROOT, Host, Lab

pytestmark = pytest.mark.xdist_group("real")

BIN = Path(sys.executable).parent
SGLANG = (
    "/opt/sglang/bin/python -m sglang.launch_server --model-path /srv/models/tiny --served-model-name tiny "
    "--device cpu --host 0.0.0.0 --port 30000 --attention-backend torch_native --sampling-backend pytorch "
    "--cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled --disable-overlap-schedule "
    "--grammar-backend none --dtype bfloat16 --context-length 2048 --max-total-tokens 8192 --max-running-requests 8"
)
HAND_WRITTEN = f"""
[Service]
User=nobody
Environment=PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 HOME=/tmp SGLANG_CACHE_DIR=/tmp/sglang
ExecStart={SGLANG}
[Install]
WantedBy=multi-user.target
"""
# Asks the server over and over from another host, at most for half an hour: a line "when status" for each answer.
POLL = """
import time, urllib.error, urllib.request
for _ in range(9000):
    at = time.time()
    try:
        status = urllib.request.urlopen("http://%s:30000/v1/models", timeout=1).status
    except urllib.error.HTTPError as error:
        status = error.code
    except OSError:
        status = 0
    print(at, status, flush=True)
    time.sleep(0.2)
"""


@dataclass(frozen=True)
class Run:
    code: int
    output: str


def pyinfra(lab: Lab, *words: str) -> Run:
    command = [str(BIN / "pyinfra"), "inventory/lab.py", "deploy.py", "--limit", "gpu1", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=lab.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    print("$", *command, "\n", done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    return Run(done.returncode, done.stdout + done.stderr)


def serving(host: Host) -> str:
    """What answers on the host itself."""
    return host.output("curl -s -m 20 http://127.0.0.1:30000/v1/models || true")


def swaps(host: Host) -> list[list[dict[str, object]]]:
    """The events of every swap, oldest swap first."""
    names = host.output("ls /var/lib/kernelswap/main/swaps").split()
    folder = "/var/lib/kernelswap/main/swaps"
    return [[json.loads(line) for line in host.read(f"{folder}/{name}/events.jsonl").splitlines()] for name in names]


def moment(events: list[dict[str, object]], step: str, kind: str) -> float:
    return next(float(str(event["at"])) for event in events if (event["step"], event["kind"]) == (step, kind))


def test_the_main_job(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    host, outside = hosts
    # A hand-written server serves before us.
    host.write("/etc/systemd/system/my-glm.service", HAND_WRITTEN)
    host.run("systemctl daemon-reload; systemctl enable --now my-glm.service 2>&1")
    host.run(
        "for i in $(seq 150); do curl -s -m 5 -f http://127.0.0.1:30000/health && exit 0; sleep 1; done; exit 1",
        timeout=200,
    )
    outside.write("/root/poll.py", POLL % host.address)
    outside.run("systemd-run --unit=poll --property=StandardOutput=file:/root/polled python3 /root/poll.py")

    # The first converge crashes for real, and the hand-written server serves again, enabled.
    first = pyinfra(lab, "--profile", "trtllm", "--reason", "faster", "-y")
    assert first.code == 1
    assert "my-glm.service serves again" in first.output
    assert "ModuleNotFoundError: No module named 'flashinfer'" in first.output
    assert "tiny" in serving(host)
    assert host.output("systemctl is-active my-glm.service; systemctl is-enabled my-glm.service") == "active\nenabled"
    assert host.run("systemctl is-active sglang-main.service", check=False).stdout != "active\n"

    # A good profile takes its place, also after the next boot.
    second = pyinfra(lab, "--profile", "torch-native", "-y")
    assert second.code == 0
    assert host.run("test -L /etc/systemd/system/multi-user.target.wants/my-glm.service", check=False).returncode == 1
    assert host.output("systemctl is-enabled sglang-main.service") == "enabled"
    good = host.output("basename $(readlink /etc/kernelswap/main/known-good)")
    pid = host.output("systemctl show -P MainPID sglang-main.service")

    # The same again changes nothing, and a release that failed is refused before anything is touched.
    again = pyinfra(lab, "-y")
    assert again.code == 0
    assert f"unchanged: {good}" in again.output
    barred = pyinfra(lab, "--profile", "trtllm", "-y")
    assert barred.code == 1
    assert "is barred" in barred.output
    assert host.output("systemctl show -P MainPID sglang-main.service") == pid

    # By force it is tried again, fails again, and the known-good serves again, verified.
    forced = pyinfra(lab, "--profile", "trtllm", "--force", "-y")
    assert forced.code == 1
    assert f"{good} serves again, verified" in forced.output
    assert "/server.log" in forced.output
    assert "tiny" in serving(host)

    # Nobody outside reached a server between its start and its verification.
    outside.run("systemctl stop poll")
    answers = [tuple(map(float, line.split())) for line in outside.read("/root/polled").splitlines()]
    crashed, committed, rolled_back = swaps(host)
    closed = [
        (moment(crashed, "start", "begin"), moment(crashed, "< start", "begin")),
        (moment(committed, "start", "begin"), moment(committed, "open", "begin")),
        (moment(rolled_back, "start", "begin"), moment(rolled_back, "< open", "begin")),
    ]
    for begin, end in closed:
        inside = [status for at, status in answers if begin <= at <= end - 1]
        assert len(inside) > 3
        assert set(inside) == {0.0}
    assert [status for at, status in answers if at > moment(rolled_back, "result", "result") + 1][-1:] in ([], [200.0])
    assert [status for at, status in answers if at < moment(crashed, "preflight", "begin")][-1] == 200.0

    # What the fleet's commands tell.
    status = kernelswap(lab, "status", "inventory/lab.py", "--limit", "gpu1")
    assert status.code == 0
    assert good in status.output
    drift = kernelswap(lab, "status", "inventory/lab.py", "--limit", "gpu1", "--drift")
    assert "gpu1: as declared and as committed" in drift.output
    assert drift.code == 0
    history = kernelswap(lab, "history", "gpu1", "--inventory", "inventory/lab.py")
    for words in ("faster", "rolled-back", "committed", "output_tok_s", "flashinfer"):
        assert words in history.output
    # The report of a real swap: of the newest, and of the one that was committed.
    newest = kernelswap(lab, "report", "gpu1", "--inventory", "inventory/lab.py", "--text")
    assert newest.output.startswith("Rolled back: trtllm-")
    assert "No module named 'flashinfer'" in newest.output
    swap = host.output("ls /var/lib/kernelswap/main/swaps").split()[1]
    page = tmp_path / "page.html"
    told = kernelswap(lab, "report", "gpu1", swap[:-2], "--inventory", "inventory/lab.py", "--output", str(page))
    assert (told.code, told.output) == (0, f"{page}\n")
    assert "output tok/s at concurrency" in page.read_text()


def kernelswap(lab: Lab, *words: str) -> Run:
    command = [str(BIN / "kernelswap"), *words]
    done = subprocess.run(command, cwd=ROOT, env=lab.environment, capture_output=True, text=True, timeout=120)
    print("$", *command, "\n", done.stdout, done.stderr)
    return Run(done.returncode, done.stdout + done.stderr)


SECRET = "sk-never-to-be-seen-0123456789"


def test_an_api_key_is_seen_nowhere(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    host = hosts[1]
    for name in ("deploy.py", "roles", "templates"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "inventory").mkdir()
    for name in ("models", "profiles"):
        (tmp_path / "inventory" / name).symlink_to(ROOT / "inventory" / name)
    text = (ROOT / "inventory/lab.py").read_text()
    keyed = '"profile": "torch-native", "instances": {"main": {"secrets": {"api-key": {"env": "LAB_KEY"}}}}'
    assert '"profile": "torch-native"' in text
    (tmp_path / "inventory/lab.py").write_text(text.replace('"profile": "torch-native"', keyed))
    environment = {**lab.environment, "LAB_KEY": SECRET, "PYTHONUNBUFFERED": "1"}
    # Brackets keep the search from finding its own command line.
    search = f"grep -ao -e '{SECRET[:-1]}[{SECRET[-1]}]' -e 'PYINFRA_SUDO_PASSWOR[D]=[^ ]*'"
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | {search}"
    host.write("/root/watch.sh", f"while sleep 0.05; do {look}; done")
    host.run("systemd-run --unit=watch --property=StandardOutput=file:/root/watched sh /root/watch.sh")
    shown = ""
    for profile, code in (("torch-native", 0), ("trtllm", 1)):
        command = [str(BIN / "pyinfra"), "inventory/lab.py", "deploy.py", "--limit", "gpu2", "--profile", profile]
        done = subprocess.run(
            [*command, "-y", "--diff", "-vvv", "--debug"],
            cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        shown += done.stdout + done.stderr
        print(done.stdout[-3000:], done.stderr[-3000:])
        assert done.returncode == code
    host.run("systemctl stop watch")

    assert host.output("curl -s -m 9 -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/v1/models") == "401"
    header = f"Authorization: Bearer {SECRET}"
    assert host.run(f"curl -s -m 9 -f -H '{header}' http://127.0.0.1:30000/v1/models").returncode == 0
    assert SECRET not in shown
    assert host.read("/root/watched") == ""
    host.run("journalctl --sync")
    holders = host.output(
        f"grep -rlaF {SECRET[:-1]} /etc /run/systemd /var/lib/kernelswap /var/log /tmp /usr/local 2>/dev/null || true"
    ).split()
    assert holders
    assert all(Path(path).name == "secrets.yaml" for path in holders)
    assert SECRET not in host.output("journalctl --no-pager -o cat", timeout=60)
    assert set(host.output("stat -c '%a %U' /etc/kernelswap/main/releases/*/secrets.yaml").splitlines()) == {"600 root"}
    assert SECRET not in host.output("cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' '")
