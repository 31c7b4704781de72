"""How a swap that died in the middle is taken up again. The whole of it runs on real hosts, in tests/lab/faults."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import host, transaction, units
from kernelswap.agent.host import Folders, Journal
from kernelswap.agent.transaction import Transaction
from kernelswap.protocol import Cause, Plan, Request, encode

REQUEST = Request("20261130T023000Z-ab12", "main", "converge", "b-2", "ada@desk")
PLAN = Plan("main", "b-2", "b", "m", "/usr/bin/python3", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
RUNS = units.UnitStatus("active", "running", 7, "/run/x", True, "", "success", None)


@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("step", ["stop", "clean", "activate", "start", "ready", "smoke", "throughput", "open"])
def test_only_what_a_rollback_has_started_is_taken_for_the_known_good(
    step: str, back: bool, rebooted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders("main", tmp_path)
    (folders.release("b-2")).mkdir(parents=True)
    (folders.release("b-2") / "plan.json").write_text(encode(PLAN))
    cause = encode(Cause("the server ended", "log", "read it")) if back else ""
    journal = Journal(REQUEST, time.time(), "boot-1", step, touched=True, back=back, previous="a-1", cause=cause)
    monkeypatch.setattr(host, "boot_id", lambda: "boot-2" if rebooted else "boot-1")
    monkeypatch.setattr(units, "status", lambda _unit: RUNS)
    seen: dict[str, Any] = {}

    def remember(self: Transaction, cause: Cause, stop: bool = True, **_others: Any) -> None:
        seen.update(stop=stop, cause=cause.what, journal=self.journal)

    monkeypatch.setattr(Transaction, "_back", remember)
    transaction.recover(folders, journal)
    assert seen["stop"] == (not rebooted and not (back and step in ("ready", "smoke", "open")))
    assert seen["cause"] == (
        "the server ended" if back else f"the {'host rebooted' if rebooted else 'agent died'} during the step {step}"
    )
    assert seen["journal"] == dataclasses.replace(journal, back=True, cause=seen["journal"].cause)
