"""What the speller writes, the real systemd of a lab host reads back byte for byte: arguments and variables."""

import base64
import io
import random
import tarfile
import uuid
from collections.abc import Iterator

import pytest
from labhost import ROOT, Host

from kernelswap.render import assignment, render, word
from kernelswap.servers import ServerSpec

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


@pytest.fixture
def folder(host: Host) -> Iterator[str]:
    """A folder on the host; units named like it are removed afterwards."""
    name = f"quoting-{uuid.uuid4().hex[:8]}"
    host.run(f"mkdir -p /run/{name}/out && chmod 777 /run/{name}/out")
    yield name
    host.run(f"systemctl stop '{name}*'; rm -rf /run/{name} /run/systemd/system/{name}*; systemctl daemon-reload")


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


def write(host: Host, files: dict[str, str]) -> None:
    for path, text in files.items():
        host.write(f"/run/{path}", text, mode=0o755)


def record(host: Host, folder: str) -> dict[str, bytes]:
    """What the recorders wrote, byte for byte."""
    packed = base64.b64decode(host.run(f"tar -c -C /run/{folder}/out . | base64").stdout)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers() if member.isfile()]
        return {member.name.removeprefix("./"): content.read() for member, content in members if content}


def test_500_command_lines_come_through_the_real_systemd(host: Host, folder: str) -> None:
    cases = generated(600)
    recorder = f"/run/{folder}/record"
    lines = [f"ExecStart={recorder} {number} {' '.join(map(word, case))}" for number, case in enumerate(cases)]
    write(
        host,
        {
            f"{folder}/record": f'#!/bin/sh\ncat /proc/$$/cmdline >/run/{folder}/out/"$1"\n',
            f"systemd/system/{folder}.service": "[Service]\nType=oneshot\nUser=nobody\n" + "\n".join(lines) + "\n",
        },
    )
    host.run(f"systemctl daemon-reload && systemctl start {folder}")
    seen = record(host, folder)
    for number, case in enumerate(cases):
        expected = "".join(f"{item}\0" for item in ["/bin/sh", recorder, str(number), *case]).encode()
        assert seen.get(str(number)) == expected, case


def test_500_variables_come_through_the_real_systemd(host: Host, folder: str) -> None:
    allowed = str.maketrans(
        "", "", "".join(map(chr, [*range(1, 9), *range(11, 32), 127])) + "\ufdd0\uffff\ufffe\U0001fffe"
    )
    values = [item.translate(allowed) for case in generated(300) for item in case if len(item) < 20_000][:600]
    assert len(values) > 500
    lines = [f"Environment={assignment(f'V{number}={value}')}" for number, value in enumerate(values)]
    write(
        host,
        {
            f"{folder}/record": f"#!/bin/sh\ncat /proc/$$/environ >/run/{folder}/out/all\n",
            f"systemd/system/{folder}.service": "[Service]\nType=oneshot\nUser=nobody\n"
            + "\n".join(lines)
            + f"\nExecStart=/run/{folder}/record\n",
        },
    )
    host.run(f"systemctl daemon-reload && systemctl start {folder}")
    seen = dict(item.split(b"=", 1) for item in record(host, folder)["all"].split(b"\0") if item)
    for number, value in enumerate(values):
        assert seen.get(f"V{number}".encode()) == value.encode(), value


def test_a_rendered_unit_runs_exactly_its_plan(host: Host, folder: str) -> None:
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
    release = render(spec, {}, "", ROOT / "templates")
    recorder = (
        f"#!/bin/sh\ncat /proc/$$/cmdline >/run/{folder}/out/argv\ncat /proc/$$/environ >/run/{folder}/out/environ\n"
    )
    unit = release.plan.unit
    write(
        host,
        {
            f"{folder}/python": recorder + "exec sleep 60\n",
            f"systemd/system/{unit}": release.files[unit],
            # Neither the agent nor a writable /run belongs to what is tested here.
            f"systemd/system/{unit}.d/test.conf": f"[Service]\nExecStartPre=\nReadWritePaths=/run/{folder}/out\n",
        },
    )
    try:
        host.run(
            f"systemd-analyze verify /run/systemd/system/{unit}; systemctl daemon-reload && systemctl start {unit}"
            f" && while [ ! -s /run/{folder}/out/environ ]; do sleep 0.1; done"
        )
        seen = record(host, folder)
        complaints = host.run(
            f"journalctl -b --no-pager -u {unit} | grep -iE 'unknown|ignor|invalid|failed' || true"
        ).stdout
    finally:
        host.run(
            f"systemctl stop {unit}; rm -rf /run/systemd/system/{unit}* /var/cache/sglang/{folder};"
            " systemctl daemon-reload"
        )
    assert not complaints
    expected = "".join(f"{item}\0" for item in ["/bin/sh", spec.python, *release.plan.argv]).encode()
    assert seen["argv"] == expected
    environment = dict(item.split(b"=", 1) for item in seen["environ"].split(b"\0") if item)
    for name, value in release.plan.environment.items():
        assert environment[name.encode()] == value.encode(), name
