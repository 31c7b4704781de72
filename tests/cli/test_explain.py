from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelswap.cli import explain

LOGS = Path(__file__).parent.parent / "agent/logs"


@pytest.mark.parametrize(
    ("log", "code", "says"),
    [
        (
            "xid_79",
            0,
            ["NVRM: Xid", "xid_79.log:38", "gpu-lost", "reboot", "once the host is in order", "Xid 79"],
        ),
        ("jit_race", 0, ["jit-race", "may work if tried again"]),
        ("graph_oom", 0, ["graph-oom", "--mem-fraction-static", "fails again as it is", "release", "sglang#4489"]),
        ("unknown_main", 1, ["ServerArgs.__init__() got an unexpected keyword", "unknown", "unknown_main.log:11"]),
        ("innocent_clean_stop", 1, ["no failure"]),
        ("innocent_empty", 1, ["no failure"]),
    ],
)
def test_what_it_says_and_its_exit_code(log: str, code: int, says: list[str]) -> None:
    result = CliRunner().invoke(explain.command, [str(LOGS / f"{log}.log")])
    assert result.exit_code == code
    for words in says:
        assert words in result.output


def test_standard_input_and_json() -> None:
    text = "launch_server.py: error: unrecognized arguments: --x --api-key sk-0123456789\n"
    result = CliRunner().invoke(explain.command, ["-", "--json"], input=text)
    found = json.loads(result.output)
    assert result.exit_code == 0
    assert (found["signature"], found["line"], found["retry"], found["blame"]) == ("unknown-flag", 1, False, "release")
    assert "sk-" not in result.output
    assert json.loads(CliRunner().invoke(explain.command, ["-", "--json"], input="hello\n").output) is None


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.log", "No such file"), (tmp_path, "Is a directory")):
        result = CliRunner().invoke(explain.command, [str(path)])
        assert result.exit_code == 2
        assert why in result.output
