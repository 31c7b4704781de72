"""What the speller writes, the real systemd of a lab host reads back byte for byte: arguments and variables."""

import dataclasses
import io
import random
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelswap.render import assignment, render, word
from kernelswap.spec import ServerSpec

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parent.parent.parent
ALPHABETS = [
    "abc",
    " \t\n\"'\\",
    "%$#;{}[]@-+!:|~`&*?<>()",
    "nHhuUtTiI%",
    "aé東😀\u2028\ufeff\ufdd0\uffff\U0001fffe\x85",
    "".join(map(chr, range(1, 33))) + "\x7f",
]
CORNERS = [
    [""],
    ["", "", ""],
    [" "],
    [";"],
    ["a", ";", "/bin/false"],
    ["%n", "%%", "%", "%h%H%i"],
    ["$HOME", "${HOME}", "$$", "$", "$${X}", "a$HOME", "${", "$$$"],
    ["\\", "\\\\", "\\n", "a\\", '\\"', "\\x41", "\\u0041"],
    ['"', "'", "\"'", 'a"b', "'a b'"],
    ["\n", "a\nb", "\r\n", "\t", "\n#x", "\n[Service]\nExecStart=/bin/false"],
    ["#x", "#", ";x", "[Service]"],
    ["-x", "@x", "+x", "!x", "!!x", ":x", "|x", "~", "--"],
    ['{"a": [1, 2.50, null], "b": "c \\"d\\" %n $HOME", "é": "\\\\"}'],
    ["東京", "\U0001f600", "\ufeff", "\ufffe", "\uffff", "\ufdd0", "\x85", "\u2028"],
    ["x" * 10_240],
    ["y z" * 40_000],
    ["\x01\x02\x1b\x7f"],
]


class Remote:
    """Commands as root on the lab's first host."""

    def __init__(self) -> None:
        lab = ROOT / ".lab"
        if not (lab / "hosts").exists():
            pytest.skip("no lab runs here: lab/lab.sh up 1")
        self.name = (lab / "hosts").read_text().split()[0]
        self.ssh = ["ssh", "-F", str(lab / "ssh_config"), self.name]

    def run(self, script: str, data: bytes = b"", seconds: float = 120) -> bytes:
        done = subprocess.run([*self.ssh, script], input=data, capture_output=True, timeout=seconds)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return done.stdout


@pytest.fixture(scope="module")
def remote() -> Remote:
    return Remote()


@pytest.fixture
def folder(remote: Remote) -> Iterator[str]:
    """A folder on the host; units named like it are removed afterwards."""
    name = f"quoting-{uuid.uuid4().hex[:8]}"
    remote.run(f"mkdir -p /run/{name}/out && chmod 777 /run/{name}/out")
    yield name
    remote.run(f"systemctl stop '{name}*'; rm -rf /run/{name} /run/systemd/system/{name}*; systemctl daemon-reload")


def generated(count: int) -> list[list[str]]:
    """The corners, and argument lists from alphabets that mean something to systemd; the same ones every time."""
    dice = random.Random(20)  # noqa: S311
    cases = list(CORNERS)
    while len(cases) < count:
        alphabet = dice.choice([*ALPHABETS, "".join(ALPHABETS)])
        cases.append(
            ["".join(dice.choices(alphabet, k=dice.choice([0, 1, 2, 5, 20, 200]))) for _ in range(dice.randint(1, 6))]
        )
    return cases


def put(remote: Remote, files: dict[str, str]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            info.mode = 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    remote.run("tar -x -C /run", packed.getvalue())


def fetch(remote: Remote, folder: str) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(remote.run(f"tar -c -C /run/{folder}/out ."))) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers() if member.isfile()]
        return {member.name.removeprefix("./"): content.read() for member, content in members if content}


def test_500_command_lines_come_through_the_real_systemd(remote: Remote, folder: str) -> None:
    cases = generated(600)
    recorder = f"/run/{folder}/record"
    lines = [f"ExecStart={recorder} {number} {' '.join(map(word, case))}" for number, case in enumerate(cases)]
    put(
        remote,
        {
            f"{folder}/record": f'#!/bin/sh\ncat /proc/$$/cmdline >/run/{folder}/out/"$1"\n',
            f"systemd/system/{folder}.service": "[Service]\nType=oneshot\nUser=nobody\n" + "\n".join(lines) + "\n",
        },
    )
    remote.run(f"systemctl daemon-reload && systemctl start {folder}")
    seen = fetch(remote, folder)
    for number, case in enumerate(cases):
        expected = "".join(f"{item}\0" for item in ["/bin/sh", recorder, str(number), *case]).encode()
        assert seen.get(str(number)) == expected, case


def test_500_variables_come_through_the_real_systemd(remote: Remote, folder: str) -> None:
    allowed = str.maketrans(
        "", "", "".join(map(chr, [*range(1, 9), *range(11, 32), 127])) + "\ufdd0\uffff\ufffe\U0001fffe"
    )
    values = [item.translate(allowed) for case in generated(300) for item in case if len(item) < 20_000][:600]
    assert len(values) > 500
    lines = [f"Environment={assignment(f'V{number}={value}')}" for number, value in enumerate(values)]
    put(
        remote,
        {
            f"{folder}/record": f"#!/bin/sh\ncat /proc/$$/environ >/run/{folder}/out/all\n",
            f"systemd/system/{folder}.service": "[Service]\nType=oneshot\nUser=nobody\n"
            + "\n".join(lines)
            + f"\nExecStart=/run/{folder}/record\n",
        },
    )
    remote.run(f"systemctl daemon-reload && systemctl start {folder}")
    seen = dict(item.split(b"=", 1) for item in fetch(remote, folder)["all"].split(b"\0") if item)
    for number, value in enumerate(values):
        assert seen.get(f"V{number}".encode()) == value.encode(), value


def test_a_rendered_unit_runs_exactly_its_plan(remote: Remote, folder: str) -> None:
    flags = {f"f{number}": item for number, case in enumerate(CORNERS[:-3]) for item in case}
    spec = ServerSpec(
        instance=folder,
        model="m",
        profile="p",
        path="/srv/models/a b%n$HOME",
        served_name='it\'s "this" \\ %n',
        host="0.0.0.0",
        port=30000,
        user="nobody",
        python=f"/run/{folder}/python",
        flags={**flags, "list": ["", "a b", "%n"], "json": {"b": "$HOME", "a": "%n \"'\\ é"}},
        environment={"QUOTED": "a \"b\" '%n' $HOME \\ \n\t é", "EMPTY": ""},
    )
    release = render(dataclasses.replace(spec), {}, "", ROOT / "templates")
    record = (
        f"#!/bin/sh\ncat /proc/$$/cmdline >/run/{folder}/out/argv\ncat /proc/$$/environ >/run/{folder}/out/environ\n"
    )
    unit = release.plan.unit
    put(
        remote,
        {
            f"{folder}/python": record + "exec sleep 60\n",
            f"systemd/system/{unit}": release.files[unit],
            # Neither the agent nor a writable /run belongs to what is tested here.
            f"systemd/system/{unit}.d/test.conf": f"[Service]\nExecStartPre=\nReadWritePaths=/run/{folder}/out\n",
        },
    )
    try:
        remote.run(
            f"systemd-analyze verify /run/systemd/system/{unit}; systemctl daemon-reload && systemctl start {unit}"
            f" && while [ ! -s /run/{folder}/out/environ ]; do sleep 0.1; done"
        )
        seen = fetch(remote, folder)
        complaints = remote.run(
            f"journalctl -b --no-pager -u {unit} | grep -iE 'unknown|ignor|invalid|failed' || true"
        ).decode()
    finally:
        remote.run(
            f"systemctl stop {unit}; rm -rf /run/systemd/system/{unit}* /var/cache/sglang/{folder};"
            " systemctl daemon-reload"
        )
    assert not complaints
    expected = "".join(f"{item}\0" for item in ["/bin/sh", spec.python, *release.plan.argv]).encode()
    assert seen["argv"] == expected
    environment = dict(item.split(b"=", 1) for item in seen["environ"].split(b"\0") if item)
    for name, value in release.plan.environment.items():
        assert environment[name.encode()] == value.encode(), name
