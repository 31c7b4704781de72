from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import start_paths, units
from kernelswap.agent.units import Starts

CASES = json.loads(Path(__file__).with_name("start_paths.json").read_text())
SCRIPTS = {
    "/opt/start.sh": "#!/bin/sh\nexport X=1\nexec python3 -m sglang.launch_server --port 30003\n",
    "/opt/calls-start.sh": "#!/bin/bash\n. /etc/profile\n/opt/start.sh\n",
    "/opt/glm/compose.yaml": "services:\n  glm:\n    image: lmsysorg/sglang:v0.5.23\n",
}
NAMES = ("glm.service", "sglang-main.service", "box")


@pytest.mark.parametrize(("skip", "text", "port"), CASES["starts"])
def test_what_starts_sglang(skip: str, text: str, port: int | None) -> None:
    found = start_paths.lines_of(text, SCRIPTS.get, NAMES, skip)
    assert [line.port for line in found] == [port]


@pytest.mark.parametrize(("skip", "text"), CASES["silent"])
def test_what_only_names_it(skip: str, text: str) -> None:
    assert start_paths.lines_of(text, SCRIPTS.get, NAMES, skip) == []


def test_a_line_has_its_number_its_script_and_no_secret() -> None:
    text = (
        "# a comment\nPATH=/bin\n\nHF_TOKEN=hf_abcdefghijk sglang serve /m --api-key hush\n@daily /opt/calls-start.sh\n"
    )
    first, second = start_paths.lines_of(text, SCRIPTS.get)
    assert (first.number, first.by) == (4, "")
    assert "hush" not in first.text
    assert "hf_abc" not in first.text
    assert (second.number, second.by) == (5, "/opt/start.sh")


def test_scripts_that_call_each_other_come_to_an_end() -> None:
    assert start_paths.lines_of("/a.sh", {"/a.sh": "/b.sh", "/b.sh": "/a.sh"}.get) == []


@pytest.mark.parametrize(("text", "found"), CASES["compose"])
def test_services_of_a_compose_file(text: str, found: list[list[Any]]) -> None:
    assert [[s.name, s.restart, s.port] for s in start_paths.compose_services(text)] == found


def test_the_commands_of_a_unit() -> None:
    text = "[Service]\n# ExecStart=/no\nExecStart=-/bin/a \\\n  b\nExecStartPre=+@/bin/c d\nExecStop=/bin/pkill x\n"
    assert start_paths.commands_of_unit(text) == "/bin/a    b\n/bin/c d"


LAUNCH = "/usr/bin/python3 -m sglang.launch_server --port 30000"
IMAGE = "Image=lmsysorg/sglang:x\n"
PODMAN = "[Service]\nExecStart=podman run lmsysorg/sglang:x\n"
UNIT = f"[Service]\nExecStart={LAUNCH}\n"


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, Starts]:
    """What systemd says of units; of others that they are enabled."""
    known: dict[str, Starts] = {}
    monkeypatch.setattr(units, "starts", lambda names: {n: known.get(n, Starts(False, True)) for n in names})
    return known


def write(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


# What lies on the host; the kind and the place by which it must be found, once. "+" before a path: executable.
PLANTED: list[tuple[dict[str, str], str, str]] = [
    ({"etc/systemd/system/glm.service": UNIT}, "hand-made-unit", "glm.service (/etc/systemd/system/glm.service)"),
    ({"run/systemd/transient/run-1.service": UNIT}, "hand-made-unit", "run-1.service"),
    ({"usr/lib/systemd/system/deb.service": UNIT}, "hand-made-unit", "deb.service"),
    (
        {
            "usr/lib/systemd/system/x.service": "[Service]\nExecStart=/bin/true\n",
            "etc/systemd/system/x.service.d/a.conf": UNIT,
        },
        "hand-made-unit",
        "x.service",
    ),
    (
        {
            "etc/systemd/system/glm@.service": UNIT,
            "etc/systemd/system/multi-user.target.wants/glm@0.service": UNIT,
        },
        "hand-made-unit",
        "glm@0.service",
    ),
    ({"run/systemd/generator/glm.service": PODMAN}, "hand-made-unit", "glm.service"),
    (
        {
            "home/ann/.config/systemd/user/glm.service": UNIT,
            "home/ann/.config/systemd/user/default.target.wants/glm.service": UNIT,
            "var/lib/systemd/linger/ann": "",
        },
        "user-unit",
        "/home/ann/.config/systemd/user/glm.service",
    ),
    (
        {
            "home/ann/.config/systemd/user/glm.service": UNIT,
            "home/ann/.config/systemd/user/timers.target.wants/glm.timer": "[Timer]\n",
        },
        "user-unit",
        "/home/ann/.config/systemd/user/glm.service",
    ),
    ({"etc/crontab": f"SHELL=/bin/sh\n@reboot root {LAUNCH}\n"}, "cron", "/etc/crontab:2"),
    ({"etc/cron.d/glm": f"*/5 * * * * ann {LAUNCH}\n"}, "cron", "/etc/cron.d/glm:1"),
    ({"+etc/cron.daily/glm": f"#!/bin/sh\n{LAUNCH}\n"}, "cron", "/etc/cron.daily/glm:2"),
    ({"var/spool/cron/crontabs/ann": f"@reboot {LAUNCH}\n"}, "cron", "/var/spool/cron/crontabs/ann:1"),
    ({"var/spool/cron/root": f"@reboot {LAUNCH}\n"}, "cron", "/var/spool/cron/root:1"),
    ({"var/spool/cron/atjobs/a0001": f"#!/bin/sh\n{LAUNCH}\n"}, "cron", "/var/spool/cron/atjobs/a0001:2"),
    ({"etc/cron.d/glm": "0 3 * * * root systemctl restart sglang-main\n"}, "cron", "/etc/cron.d/glm:1"),
    (
        {"etc/cron.d/glm": "@reboot root /srv/glm/run.sh\n", "srv/glm/run.sh": f"cd /srv\n{LAUNCH}\n"},
        "cron",
        "/etc/cron.d/glm:1",
    ),
    (
        {"etc/cron.d/glm": "@reboot root /usr/local/bin/glm\n", "+usr/local/bin/glm": f"{LAUNCH}\n"},
        "cron",
        "/etc/cron.d/glm:1",
    ),
    ({"+etc/rc.local": f"#!/bin/sh\n{LAUNCH} &\n"}, "boot-script", "/etc/rc.local:2"),
    ({"etc/supervisord.d/glm": f"[program:glm]\ncommand={LAUNCH}\n"}, "supervisor", "/etc/supervisord.d/glm:2"),
    ({"etc/containers/systemd/glm.container": f"[Container]\n{IMAGE}"}, "container", "glm.container:2"),
    ({"etc/kubernetes/manifests/glm.yaml": "a:\n image: lmsysorg/sglang:x\n"}, "container", "manifests/glm.yaml:2"),
    ({"opt/glm/compose.yaml": CASES["compose"][0][0]}, "compose", "/opt/glm/compose.yaml, service glm"),
    ({"home/ann/a/b/docker-compose.prod.yml": CASES["compose"][3][0]}, "compose", "docker-compose.prod.yml, service x"),
    ({"root/compose.yml": CASES["compose"][0][0]}, "compose", "/root/compose.yml, service glm"),
    (
        {
            "var/lib/docker/containers/c1/config.v2.json": json.dumps(
                {"Name": "/glm", "Config": {"Image": "x", "Cmd": ["sglang", "serve"]}, "State": {"Running": False}}
            ),
            "var/lib/docker/containers/c1/hostconfig.json": json.dumps({"RestartPolicy": {"Name": "always"}}),
        },
        "container",
        "container glm",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("files", "kind", "where"), PLANTED, ids=[f"{kind} {where}" for _, kind, where in PLANTED])
def test_each_way_to_a_server_is_found_once(
    tmp_path: Path, states: dict[str, Starts], files: dict[str, str], kind: str, where: str
) -> None:
    for path, text in files.items():
        write(tmp_path / path.lstrip("+"), text, 0o755 if path.startswith("+") else 0o644)
    found = start_paths.look({"sglang-main.service"}, tmp_path)
    assert [(path.kind, where in path.where) for path in found.paths] == [(kind, True)]
    assert found.unknown == ()


# What must not be taken for a way to a server.
HARMLESS: list[dict[str, str]] = [
    {"etc/systemd/system/sglang-main.service": UNIT},
    {"run/systemd/transient/kernelswap-adopted-main-0.service": UNIT},
    {"etc/systemd/system/off.service": UNIT},
    {"etc/systemd/system/glm@.service": UNIT},
    {"home/ann/.config/systemd/user/glm.service": UNIT},
    {"etc/rc.local": f"{LAUNCH}\n"},
    {"etc/cron.daily/glm": f"{LAUNCH}\n"},
    {"etc/cron.d/watch": "* * * * * root pgrep -f sglang.launch_server || logger sglang is down\n"},
    {"opt/sglang/docker/compose.yaml": CASES["compose"][0][0], "opt/sglang/python/sglang/version.py": ""},
    {"opt/a/b/c/d/e/compose.yaml": CASES["compose"][0][0]},
    {"opt/glm/notes.txt": LAUNCH},
    {
        "var/lib/docker/containers/c1/config.v2.json": json.dumps(
            {"Name": "/glm", "Config": {"Image": "lmsysorg/sglang"}, "State": {"Running": False}}
        ),
        "var/lib/docker/containers/c1/hostconfig.json": json.dumps({"RestartPolicy": {"Name": "no"}}),
    },
]


@pytest.mark.parametrize("files", HARMLESS, ids=[next(iter(files)) for files in HARMLESS])
def test_what_starts_nothing_is_none(tmp_path: Path, states: dict[str, Starts], files: dict[str, str]) -> None:
    states["off.service"] = Starts(False, False)
    for path, text in files.items():
        write(tmp_path / path, text)
    assert start_paths.look({"sglang-main.service"}, tmp_path).paths == ()


def test_a_masked_unit_and_an_alias_are_no_unit_of_their_own(tmp_path: Path, states: dict[str, Starts]) -> None:
    folder = tmp_path / "etc/systemd/system"
    write(folder / "glm.service", UNIT)
    (folder / "alias.service").symlink_to("glm.service")
    write(tmp_path / "usr/lib/systemd/system/masked.service", UNIT)
    (folder / "masked.service").symlink_to("/dev/null")
    assert len(start_paths.look(set(), tmp_path).paths) == 1


def test_what_cannot_be_looked_at_is_unknown(
    tmp_path: Path, states: dict[str, Starts], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "etc/systemd/system/glm.service", UNIT)
    write(tmp_path / "var/lib/docker/containers/c1/config.v2.json", "{")
    for number in range(30):
        write(tmp_path / f"opt/{number}/file", "")
    rules = {**start_paths.known(), "projects": {**start_paths.known()["projects"], "count": 20}}
    monkeypatch.setattr(start_paths, "known", lambda: rules)

    def fail(_names: object) -> dict[str, Starts]:
        raise units.UnitError("systemctl show: no answer within 60 s")

    monkeypatch.setattr(units, "starts", fail)
    found = start_paths.look(set(), tmp_path)
    assert [place for place, _ in found.unknown] == [
        "/var/lib/docker/containers/c1/config.v2.json",
        "systemctl show",
        next(place for place, _ in found.unknown if place.startswith("/opt")),
    ]


def test_the_places_are_told(tmp_path: Path, states: dict[str, Starts]) -> None:
    looked = "; ".join(start_paths.look(set(), tmp_path).looked)
    for word in ("systemd units", "units of users", "cron", "rc.local", "Compose files (/opt, /srv, /root, /home/*"):
        assert word in looked
    assert os.sep in looked
