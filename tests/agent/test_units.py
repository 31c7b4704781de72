from __future__ import annotations

import pytest

from kernelswap.agent import units
from kernelswap.agent.units import Starts

# What `systemctl show` says of units, by name; what is not there is inactive.
SAID = {
    "on.service": {"UnitFileState": "enabled", "WantedBy": "multi-user.target"},
    "off.service": {"UnitFileState": "disabled"},
    "runs.service": {"ActiveState": "activating"},
    "failed.service": {"ActiveState": "failed", "UnitFileState": "static"},
    "linked.service": {"UnitFileState": "static", "RequiredBy": "my.target"},
    "timed.service": {"UnitFileState": "static", "TriggeredBy": "on.timer off.timer up.timer"},
    "untimed.service": {"UnitFileState": "static", "TriggeredBy": "off.timer"},
    "on.timer": {"UnitFileState": "enabled"},
    "up.timer": {"ActiveState": "active", "UnitFileState": "static"},
    "off.timer": {"UnitFileState": "disabled"},
}


@pytest.fixture(autouse=True)
def systemctl(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(command: str, properties: str, mark: str, *names: str) -> str:
        assert (command, mark) == ("show", "--")
        asked = properties.partition("=")[2].split(",")
        default = {"ActiveState": "inactive"}
        return "\n\n".join(
            "\n".join(f"{key}={({**default, **SAID[name]}).get(key, '')}" for key in asked) + "\n" for name in names
        )

    monkeypatch.setattr(units, "_systemctl", answer)


@pytest.mark.parametrize(
    ("name", "starts", "text"),
    [
        ("on", Starts(False, True, ("multi-user.target",)), "enabled, started by multi-user.target"),
        ("off", Starts(False, False), ""),
        ("runs", Starts(True, False), "running"),
        ("failed", Starts(False, False), ""),
        ("linked", Starts(False, False, ("my.target",)), "started by my.target"),
        ("timed", Starts(False, False, ("on.timer", "up.timer")), "started by on.timer, started by up.timer"),
        ("untimed", Starts(False, False), ""),
    ],
)
def test_what_starts_a_unit(name: str, starts: Starts, text: str) -> None:
    found = units.starts([f"{name}.service", "on.service"])[f"{name}.service"]
    assert (found, str(found), bool(found)) == (starts, text, bool(text))
