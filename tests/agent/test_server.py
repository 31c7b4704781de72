from __future__ import annotations

import pytest

from kernelswap.agent import server, units
from kernelswap.protocol import Plan


@pytest.mark.parametrize(("result", "blame"), [("oom-kill", "host"), ("timeout", "host"), ("exit-code", "release")])
def test_who_is_to_blame_for_an_end_without_a_word(result: str, blame: str) -> None:
    status = units.UnitStatus("failed", "failed", 0, "", False, "", result, None)
    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
    assert server.unit_failure(plan, status, "it ended").cause.blame == blame
