"""`kernelswap diff` against real processes: a server by hand, two releases, and a unit that was edited."""

from __future__ import annotations

import json
from pathlib import Path

from labhost import Lab
from project import MODEL, Project, count_sessions, release, sessions, traces, unused

BY_HAND = (
    "systemd-run --scope --unit=by-hand env PYTHONPATH=/opt/standin COLOUR=red DB_PASSWORD=never-seen "
    "/usr/bin/python3 -m sglang.launch_server --model-path=/srv/models/tiny --device cpu --attention-back triton "
    "--port 30000 --api-key never-seen >/dev/null 2>&1 </dev/null & "
)
WAIT = "for _ in $(seq 100); do curl -sf http://127.0.0.1:30000/health && exit; sleep 0.2; done; exit 1"
EDITED = """
[Service]
Environment=COLOUR=blue
ExecStart=
ExecStart=/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --served-model-name standin \
  --host 0.0.0.0 --port 30000 --device=cpu --attention-backend triton --config ${CREDENTIALS_DIRECTORY}/secrets.yaml
"""


def test_profiles_releases_and_what_really_runs(lab: Lab, tmp_path: Path) -> None:
    host = unused(lab)
    project = Project(tmp_path, [(host, {})]).write()
    project.model(f"{MODEL}\nsecrets: {{api-key: {{file: key}}}}")
    (tmp_path / "key").write_text("never-seen-either")

    def diff(a: str, b: str, *words: str) -> tuple[int, str]:
        done = project.kernelswap("diff", a, b, "--inventory", "inventory/hosts.py", *words)
        assert "never-seen" not in done.output
        return done.code, done.output

    running, known_good, previous = (f"{host.name}:{what}" for what in ("running", "known-good", "previous"))

    # On a host that knows nothing of us, a server by hand.
    code, shown = diff("plain", running)
    assert code == 2
    assert "no SGLang server runs there" in shown
    host.run(BY_HAND + WAIT)
    empty = traces(host)
    code, shown = diff("plain", running)
    assert code == 1
    for line in (
        "  attention-backend: (unset) -> triton",
        "  moe-runner-backend: auto -> (unset: auto)",
        "  COLOUR: (unset) -> red",
        "  DB_PASSWORD: (unset) -> (secret)",
        "  served name: standin -> /srv/models/tiny",
        "  address: 0.0.0.0 -> 127.0.0.1",
    ):
        assert line in shown.splitlines()
    assert "api-key" not in shown
    assert "device" not in shown
    assert traces(host) == empty
    host.run("systemctl stop by-hand.scope")

    # Two releases, and the server as it was committed.
    for profile in ("triton", "plain"):
        assert project.deploy("--profile", profile, "-y").code == 0
    count_sessions(host)
    left, before = traces(host), sessions(host)
    code, shown = diff(known_good, running)
    asked = sessions(host) - before - 1  # this question is a session, too
    assert (code, asked) == (0, 1)
    assert "no difference" in shown
    assert traces(host) == left
    code, shown = diff(previous, known_good)
    assert code == 1
    assert "  moe-runner-backend: triton -> auto" in shown.splitlines()
    assert diff(f"{host.name}:{release(host)[:-2]}", "plain")[0] == 0
    code, shown = diff(known_good, f"{host.name}:plian")
    assert code == 2
    assert "did you mean `plain`?" in shown

    # A unit that somebody edited.
    host.write("/etc/systemd/system/sglang-main.service.d/override.conf", EDITED)
    host.run(f"systemctl daemon-reload; systemctl restart sglang-main; {WAIT}")
    code, shown = diff(known_good, running, "--json")
    assert code == 1
    changes = json.loads(shown)[0]["changes"]
    assert [(c["section"], c["name"], c["before"]["declared"], c["after"]["declared"]) for c in changes] == [
        ("flags", "attention-backend", None, "triton"),
        ("flags", "moe-runner-backend", "auto", None),
        ("environment", "COLOUR", None, "blue"),
    ]
