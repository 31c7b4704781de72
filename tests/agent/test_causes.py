"""Every log under logs/ begins with the expected verdict: `# signature | the line that is the cause`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelswap.agent import causes

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_cause_of_a_log(path: Path) -> None:
    head, *lines = path.read_text().splitlines()
    signature, _, what = head.lstrip("# ").partition(" | ")
    cause = causes.find(lines, causes.load(), "here")
    if signature == "none":
        assert cause is None
    else:
        assert cause is not None
        assert (cause.signature, cause.what) == (signature, what)


def test_every_signature_names_its_source_and_way_out() -> None:
    for signature in causes.load().signatures:
        assert signature.source
        assert signature.todo
        assert signature.blame in ("release", "host")
    ids = [signature.id for signature in causes.load().signatures]
    assert len(ids) == len(set(ids))


def test_progress_lines() -> None:
    table = causes.load()
    lines = ["[2026-11-30 TP0] Load weight begin. avail mem=1 GB", "hello", "Capturing batches (bs=4): 10%"]
    assert causes.progress(lines, table) == [lines[0], lines[2]]
