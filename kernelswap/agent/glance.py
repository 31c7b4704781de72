"""A glance at a host: the texts from which a deploy decides, read with as little code as can be; state.py judges.

It is asked of every host in every run, and to load modules costs a host more than all that is done here. So it comes
along as `python3 -IS -c`, takes modules only that are built in, and starts nothing: systemctl alone costs half of
what all this does. Where more is to be seen than servers that run and instances that are none, it leaves the answer to
the agent. Arguments: instances and users, comma-separated, then the same as a question to the agent. It prints a Python
literal.
"""

from __future__ import annotations

import os
import pwd
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

AGENT = "/usr/local/lib/kernelswap/agent.pyz"
DIGEST = ".digest"  # of the agent beside it: BLAKE2b, then inode, size, times of change as nanoseconds
WANTS = "etc/systemd/system/multi-user.target.wants"
RECOVER = "kernelswap-recover@"
MEMBER = "kernelswap-member@"
METRICS = "etc/kernelswap/metrics"
DRIFT_UNITS = ("kernelswap-drift.service", "kernelswap-drift.timer")
# systemd keeps this for journald from the start of a unit until it is inactive or has failed: unit_export_state_files()
# and unit_notify() in its src/core/unit.c, since version 236.
BEGUN = "run/systemd/units/invocation:"
# Where a hash is built in (SHA-256: since Python 3.12, and before), and where that was left out. Without OpenSSL
# SHA-256 takes 4 ms for the agent, and BLAKE2b a third of it.
MODULES = {"sha256": ("_sha2", "_sha256", "hashlib"), "blake2b": ("_blake2", "hashlib")}
WHOLE = 50  # reports of the history that come whole; older ones without their steps


def look(instances: Sequence[str], users: Sequence[str], root: str = "/") -> dict[str, Any]:
    """What a file says is text, None where there is none; a digest is SHA-256, the agent's BLAKE2b, "" where there is
    none."""
    key = text(f"{root}etc/kernelswap/key")
    return {
        "agent": agent(root + AGENT.lstrip("/")),
        "key": key,
        "users": tuple(user for user in users if exists(user)),
        "recover_unit": digest(f"{root}etc/systemd/system/{RECOVER}.service"),
        "recover_enabled": tuple(
            name for name in instances if os.path.exists(f"{root}{WANTS}/{RECOVER}{name}.service")
        ),
        "member_unit": digest(f"{root}etc/systemd/system/{MEMBER}.service"),
        "metrics": link(root + METRICS),
        "drift_units": drift_units(root),
        "instances": {name: instance(name, root, (key or "").strip()) for name in instances},
    }


def agent(path: str) -> str:
    """Its digest; where compiled.py kept that of the very same file it need not be read, which takes long."""
    try:
        kept, now = (text(path + DIGEST) or "").split(), os.stat(path)
    except OSError:
        return ""
    same = kept[1:] == [str(each) for each in (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)]
    return kept[0] if same else digest(path, "blake2b")


def drift_units(root: str) -> str:
    """Digest of their texts, one after the other; "" where the timer is not enabled."""
    if not os.path.exists(f"{root}etc/systemd/system/timers.target.wants/{DRIFT_UNITS[1]}"):
        return ""
    texts = [text(f"{root}etc/systemd/system/{name}") or "" for name in DRIFT_UNITS]
    return hashed("".join(texts).encode("utf-8", "surrogateescape"))


def unit_names(instances: Sequence[str]) -> list[str]:
    """Of each instance its server, the agent at work, and who keeps it in its routers."""
    names = ("sglang-{}.service", "kernelswap-swap-{}.service", MEMBER + "{}.service")
    return [name.format(each) for each in instances for name in names]


def running(instances: Sequence[str], servers: Collection[str], root: str = "/") -> dict[str, float] | None:
    """Units that run and are started by a boot: since when they start, epoch seconds. What is not told does not run.
    None: systemd must be asked. A server that is just being stopped runs until it has ended.

    servers: the units with a server, see `servers`.
    """
    found = {}
    for name in instances:
        server, swap, keeper = unit_names([name])
        if begun(swap, root) or os.path.lexists(f"{root}run/systemd/transient/{swap}"):
            return None
        since = {unit: begun(unit, root) for unit in (server, keeper)}
        on = {unit: moment for unit, moment in since.items() if moment and os.path.lexists(f"{root}{WANTS}/{unit}")}
        nothing = not since[server] and not os.path.lexists(f"{root}etc/systemd/system/{server}")
        if (server in on) != (server in servers) or (server not in on and not nothing):
            return None
        found.update(on)
    return found


def begun(unit: str, root: str) -> float:
    try:
        return os.lstat(root + BEGUN + unit).st_mtime
    except FileNotFoundError:
        return 0


def instance(name: str, root: str, key: str) -> dict[str, Any]:
    traffic = text(f"{root}etc/kernelswap/{name}/traffic.json")
    config, state, unit = f"{root}etc/kernelswap/{name}", f"{root}var/lib/kernelswap/{name}", f"sglang-{name}.service"
    candidate = f"{root}run/systemd/system.control/{unit}"
    known_good = link(f"{config}/known-good").rpartition("/")[2] or None
    committed = text(f"{config}/releases/{known_good}/{unit}") if known_good else None
    releases = [name for name in listed(f"{config}/releases") if not name.startswith(".")]  # which is being deleted
    staged = [name for name in releases if os.path.isfile(f"{config}/releases/{name}/plan.json")]
    return {
        "known_good": known_good,
        "intact": committed is not None
        and committed == text(f"{root}etc/systemd/system/{unit}")
        and not (os.path.exists(candidate) or os.path.exists(f"{candidate}.d")),
        "releases": {release: digests(f"{config}/releases/{release}") for release in staged},
        "plan": text(f"{config}/releases/{known_good}/plan.json") if known_good else None,
        "history": history((text(f"{state}/history.jsonl") or "").split("\n")),
        "traffic": keyed_digest(key, traffic) if traffic else "",
        "journal": os.path.exists(f"{state}/journal.json"),
    }


def history(lines: Sequence[str]) -> list[str]:
    reports = [line for line in lines if line]
    return [thin(line) for line in reports[:-WHOLE]] + reports[-WHOLE:]


def thin(line: str) -> str:
    """A report without what its steps were; what is none is told as it is."""
    import json

    try:
        return json.dumps({**json.loads(line), "steps": [], "notes": []})
    except (ValueError, TypeError):
        return line


def digests(folder: str) -> dict[str, str]:
    """File name -> SHA-256; a secret's hash is not for telling."""
    files = [name for name in listed(folder) if os.path.isfile(f"{folder}/{name}")]
    return {name: "" if name == "secrets.yaml" else digest(f"{folder}/{name}") for name in files}


def servers(proc: str, ours: Sequence[str]) -> set[str] | None:
    """Of our units those whose main process is SGLang. None: there may be SGLang in another, or in none; so it says of
    more than what is, and identity.py has the last word."""
    asking = ancestors(proc, str(os.getpid()))  # whose words hold this very text
    found = set()
    for pid in listed(proc):
        if not pid.isdigit() or pid in asking or not may_be_server(f"{proc}/{pid}"):
            continue
        places = read(f"{proc}/{pid}/cgroup").decode("utf-8", "replace").replace("\n", "/").split("/")
        unit = next((name for name in ours if name in places), None)
        if unit is None:
            return None
        fields = stat(proc, pid)
        # A main process has a session of its own by systemd, as its guard has; what is left of one before it has not.
        leads = fields[3:4] == [pid.encode()] and fields[0] != b"Z"
        if leads and AGENT.encode() not in read(f"{proc}/{pid}/cmdline"):
            found.add(unit)
    return found


def ancestors(proc: str, pid: str) -> list[str]:
    """A process and all above it."""
    found = []
    while pid not in found and pid != "0":
        found.append(pid)
        fields = stat(proc, pid)
        pid = fields[1].decode() if fields else "0"
    return found


def stat(proc: str, pid: str) -> list[bytes]:
    """What proc(5) says of a process after its name; nothing where it has ended."""
    return read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()


def may_be_server(entry: str) -> bool:
    words = read(f"{entry}/cmdline")
    if b"sgl" in words or b"sgl" in read(f"{entry}/stat"):  # which holds the name
        return True
    return b"multiprocessing" in words and b"SGLANG_RUN_ID=" in read(f"{entry}/environ")


def digest(path: str, algorithm: str = "sha256") -> str:
    try:
        with open(path, "rb") as file:
            return hashed(file.read(), algorithm)
    except OSError:
        return ""


def hashed(data: bytes, algorithm: str = "sha256") -> str:
    """hashlib would load OpenSSL."""
    for name in MODULES[algorithm]:
        try:
            return str(getattr(__import__(name), algorithm)(data).hexdigest())
        except ImportError:
            continue
    raise OSError(f"no {algorithm}")


def keyed_digest(key: str, content: str) -> str:
    """As protocol.keyed_digest, HMAC by RFC 2104. The module hmac would load OpenSSL."""
    block = key.encode().ljust(64, b"\0") if len(key) <= 64 else bytes.fromhex(hashed(key.encode())).ljust(64, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in block) for pad in (0x36, 0x5C))
    return hashed(outer + bytes.fromhex(hashed(inner + content.encode("utf-8", "surrogateescape"))))


def text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # of a process that has ended
        return b""


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def main(instances: str, users: str, question: str) -> None:
    names = instances.split(",")
    try:
        serving = servers("/proc", unit_names(names))
        units = None if serving is None else running(names, serving)
        if units is not None:
            seen = {**look(names, [user for user in users.split(",") if user]), "units": units}
            if not any(each["journal"] for each in seen["instances"].values()):  # of a swap that has not ended
                print("glance", ascii(seen))
                return
    except OSError:
        pass
    if os.path.exists(AGENT):
        os.execv(sys.executable, [sys.executable, "-IS", AGENT, "inspect", question])


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # to tidy up would take longer than all that was done
