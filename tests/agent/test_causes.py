"""Every log under logs/ begins with the expected verdict: `# signature | the line that is the cause`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelswap.agent import causes, logs

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_cause_of_a_log(path: Path) -> None:
    with path.open("rb") as file:
        signature, _, what = file.readline().decode().strip("# \n").partition(" | ")
        cause = causes.find(logs.read(file), causes.load(), "here")
    if signature == "none":
        assert cause is None
    else:
        assert cause is not None
        assert (cause.signature, cause.what) == (signature, what)


def test_there_are_logs_of_every_kind() -> None:
    verdicts = [path.open("rb").readline().decode().strip("# \n").partition(" | ")[0] for path in LOGS]
    assert verdicts.count("none") >= 15
    assert verdicts.count("unknown") >= 8
    assert len(verdicts) >= 100
