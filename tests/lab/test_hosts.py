"""The lab's hosts behave as bare-metal hosts do, and leave nothing behind."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from labhost import ROOT, Host, Lab

PYINFRA = str(Path(sys.executable).with_name("pyinfra"))


def test_a_power_cut_keeps_disk_and_journal(host: Host) -> None:
    host.run("echo kept >/var/lib/kept; echo lost >/run/lost; logger -t power-test before")
    boot = host.read("/proc/sys/kernel/random/boot_id")
    host.reboot()
    assert host.read("/proc/sys/kernel/random/boot_id") != boot
    assert host.read("/var/lib/kept") == "kept\n"
    assert host.run("test -e /run/lost", check=False).returncode == 1
    assert "before" in host.output("journalctl -b -1 -t power-test -o cat")
    assert host.output("systemctl is-system-running") == "running"


def test_a_host_reboots_itself(host: Host) -> None:
    boot = host.read("/proc/sys/kernel/random/boot_id")
    host.run("systemctl reboot", check=False)
    host.hang_up()
    deadline = time.monotonic() + 60
    while host.run("cat /proc/sys/kernel/random/boot_id", check=False).stdout in ("", boot):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_sudo_needs_the_password(host: Host) -> None:
    assert host.run("sudo -n true", user="ops", check=False).returncode != 0
    assert host.run("sudo -S -p '' id -un", user="ops", data=b"ops\n").stdout == "root\n"
    assert host.run("sudo -k -S -p '' true", user="ops", data=b"wrong\n", check=False).returncode != 0


def test_the_host_key_is_checked(hosts: list[Host], tmp_path: Path) -> None:
    first, second = hosts
    swapped = (
        (first.lab.folder / "known_hosts")
        .read_text()
        .replace(first.address, "x")
        .replace(second.address, first.address)
    )
    (tmp_path / "known_hosts").write_text(swapped)
    ssh = ["ssh", "-F", str(first.lab.folder / "ssh_config"), "-o", f"UserKnownHostsFile={tmp_path}/known_hosts"]
    done = subprocess.run([*ssh, first.address, "true"], capture_output=True, text=True)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


@pytest.mark.parametrize(("user", "sudo"), [("ops", True), ("root", False)])
def test_pyinfra_reaches_every_host(lab: Lab, user: str, sudo: bool) -> None:
    environment = {**lab.environment, "KERNELSWAP_LAB_USER": user}
    command = [PYINFRA, "inventory/lab.py", "exec", "--", "id -un; hostname"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.sub(" +", " ", done.stdout + done.stderr)  # names are padded to the longest
    assert said.count("] root") == len(lab.hosts)
    assert all(f"[{host.name}] {host.name}" in said for host in lab.hosts)


def test_without_a_lab_the_inventory_says_what_to_type(lab: Lab, tmp_path: Path) -> None:
    environment = {**lab.environment, "KERNELSWAP_LAB": str(tmp_path)}
    command = [PYINFRA, "inventory/lab.py", "exec", "--", "true"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "no lab is running; make lab" in done.stdout + done.stderr


def test_hosts_reach_each_other(hosts: list[Host]) -> None:
    first, second = hosts
    assert first.output(f"timeout 5 bash -c 'head -c 7 </dev/tcp/{second.address}/22'") == "SSH-2.0"


def test_down_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    beside = Lab(tmp_path / "beside")
    try:
        (host,) = beside.up(1)
        assert host.address not in {other.address for other in lab.hosts}
        host.run("systemd-run --unit=stray --collect sleep 1000; echo x >/dev/shm/stray")
        address, leftovers = host.address, traces(beside.folder)
        assert len(leftovers) > 5
    finally:
        beside.down()
    assert traces(beside.folder) == []
    assert address.rpartition(".")[0] + ".1/" not in subprocess.check_output(["ip", "-4", "addr"], text=True)
    assert not beside.folder.exists()
    assert lab.hosts[0].output("hostname") == "gpu1"


def test_down_cleans_up_after_an_interrupted_up_and_a_lost_folder(tmp_path: Path) -> None:
    beside = Lab(tmp_path / "beside")
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            beside.sh("up", "2", timeout=0.6)
        for path in beside.folder.glob("*"):
            if path.is_file():
                path.unlink()
    finally:
        beside.down()
    assert traces(beside.folder) == []


def traces(folder: Path) -> list[str]:
    """What the kernel still knows of a lab: every name it gives carries the lab's tag or folder."""
    number = int(subprocess.check_output(["cksum"], input=f"{folder}\n", text=True).split()[0])
    looks = ["cat /proc/self/mounts", "ip netns list", "ip -o link show", "find /sys/fs/cgroup -type d -name 'ks*'"]
    said = [line for look in looks for line in subprocess.check_output(look, shell=True, text=True).splitlines()]  # noqa: S602
    said += subprocess.check_output(["ps", "axww", "-o", "args="], text=True).splitlines()
    return [line for line in said if f"ks{number:08x}" in line or str(folder) in line]
