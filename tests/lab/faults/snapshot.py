"""Runs on a host and prints what is there, as systemd, /proc and the files say: none of it by Kernelswap's own code."""

import json
import os
import subprocess
from pathlib import Path

UNIT = "sglang-main.service"
CONFIG = Path("/etc/kernelswap/main")
STATE = Path("/var/lib/kernelswap/main")
CONTROL = Path("/run/systemd/system.control")
PROPERTIES = "ActiveState,MainPID,FragmentPath,DropInPaths,UnitFileState,Restart,IPAddressDeny,NeedDaemonReload"


def output(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def processes():
    for entry in Path("/proc").iterdir():
        try:
            argv = (entry / "cmdline").read_text().split("\0") if entry.name.isdigit() else []
            stat = (entry / "stat").read_text().rpartition(")")[2].split() if argv else []
        except OSError:
            continue
        if argv and (argv[0].startswith("sglang::") or "sglang.launch_server" in argv) and stat[0] != "Z":
            kind = argv[0] if argv[0].startswith("sglang::") else "launcher"
            yield {"pid": int(entry.name), "kind": kind, "cgroup": (entry / "cgroup").read_text()}


def runs(path, pid):
    """Whether the unit's main process is this very plan's."""
    try:
        plan = json.loads(text(path))
    except ValueError:  # there is none, or a test has broken it
        return False
    argv = text(Path("/proc") / pid / "cmdline").rstrip("\0").split("\0")
    environment = text(Path("/proc") / pid / "environ").split("\0")
    # GPUs are UUIDs in the plan, and today's indices in the process.
    variables = [f"{name}={value}" for name, value in plan["environment"].items() if name != "CUDA_VISIBLE_DEVICES"]
    return argv[1:] == plan["argv"] and set(variables) <= set(environment)


def text(path):
    return path.read_text() if path.exists() else ""


unit = dict(line.partition("=")[::2] for line in output("systemctl", "show", f"-p{PROPERTIES}", UNIT).splitlines())
starts = output("journalctl", "-b", "-u", UNIT, "-ocat", "--no-pager").splitlines()
good = CONFIG / "known-good"
print(
    json.dumps(
        {
            "processes": sorted(processes(), key=lambda process: process["kind"]),
            "unit": unit,
            "committed": text(Path("/etc/systemd/system") / UNIT) == text(good / UNIT) != "",
            "runs_known_good": runs(good / "plan.json", unit["MainPID"]),
            "leftovers": [str(path) for path in CONTROL.rglob("*")] if CONTROL.exists() else [],
            "known_good": good.readlink().name if good.is_symlink() else None,
            "journal": text(STATE / "journal.json"),
            "history": [json.loads(line) for line in text(STATE / "history.jsonl").splitlines()],
            "starts": [line for line in starts if "server_args=" in line],
            "busy": [
                name
                for name in ("swap-main", "recover@main")
                if output("systemctl", "is-active", f"kernelswap-{name}").strip() in ("active", "activating")
            ],
            "failed": output("systemctl", "--failed", "--no-legend", "--plain").split("\n")[0],
            "boot": text(Path("/proc/sys/kernel/random/boot_id")).strip(),
            "load": os.getloadavg()[0],
        }
    )
)
