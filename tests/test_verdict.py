"""What is said of the end of a swap: a failed one names host, step, cause, evidence and what to type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelswap import verdict
from kernelswap.protocol import Cause, HostFault, Report, Request, StepResult

COMMAND = "pyinfra inventory/gpu.py deploy.py --profile trtllm"
REQUEST = Request("id", "main", "converge", "trtllm-1", "ada@desk", host="gpu7", command=COMMAND)
CAUSE = Cause("ModuleNotFoundError: No module named 'flashinfer'", "/e/server.log:6", "install it", "x", "release")
STEPS = (StepResult("preflight", 0.1, True), StepResult("ready", 9, False), StepResult("< stop", 1, False))
FAILED = Report(REQUEST, "rolled-back", 10.0, 41.2, "cutlass-0", "cutlass-0", CAUSE, evidence="/e", steps=STEPS)


def test_a_rollback() -> None:
    assert verdict.text(FAILED).splitlines() == [
        "ROLLED BACK from trtllm-1 in 31.2 s; cutlass-0 serves again, verified",
        "  where: host gpu7, instance main, step ready",
        "  cause: ModuleNotFoundError: No module named 'flashinfer'",
        "  try: install it; the same release fails again as it is; it is barred: change the profile, or add --force",
        "  see: /e/server.log:6",
        "  evidence: /e",
        f"  next: {COMMAND}",
    ]


@pytest.mark.parametrize("outcome", ["rolled-back", "refused", "down"])
@pytest.mark.parametrize("blame", ["release", "host"])
def test_every_message_of_a_failed_swap_is_whole(outcome: str, blame: str) -> None:
    said = verdict.text(replace(FAILED, outcome=outcome, cause=replace(CAUSE, blame=blame)))
    for words in ("gpu7", "main", "step ready", CAUSE.what, "install it", "evidence: /e", f"{COMMAND}"):
        assert words in said
    assert ("--force" in said) == (blame == "release" and outcome != "refused")


def test_faults_have_a_line_each_with_its_way_out() -> None:
    faults = (HostFault("port 30000 is taken by nginx", "stop it"), HostFault("/run has 1 MiB free", "free disk space"))
    cause = Cause("; ".join(map(str, faults)), "/r", "correct these", "preflight", faults=faults)
    refused = replace(FAILED, outcome="refused", cause=cause, steps=(StepResult("preflight", 0.1, False),))
    assert verdict.text(refused).splitlines() == [
        "REFUSED trtllm-1, nothing was touched",
        "  where: host gpu7, instance main, step preflight",
        "  cause: 2 faults:",
        "    port 30000 is taken by nginx: stop it",
        "    /run has 1 MiB free: free disk space",
        "  see: /r",
        "  evidence: /e",
        f"  next: {COMMAND}",
    ]


def test_what_was_forced_is_not_told_to_be_forced() -> None:
    forced = replace(FAILED, request=replace(REQUEST, command=f"{COMMAND} --force"))
    assert verdict.text(forced).endswith(f"next: {COMMAND} --force")
    assert "or add --force" not in verdict.text(forced)


def test_a_success_is_one_line() -> None:
    assert verdict.text(replace(FAILED, outcome="committed", cause=None)) == "committed trtllm-1 in 31.2 s"
