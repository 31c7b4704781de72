from __future__ import annotations

import contextlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kernelswap.agent.server import Failed
from kernelswap.agent.verify import accuracy
from kernelswap.measured import AccuracyVerdict
from kernelswap.protocol import Accuracy, Plan

PLAN = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "127.0.0.1", 1)


def judged(
    scores: tuple[float, ...], floor: float | None = None, known: AccuracyVerdict | None = None
) -> AccuracyVerdict:
    return accuracy.judge("b-2", "key", scores, Accuracy("/q", questions=100, floor=floor), known)


KNOWN = replace(judged((0.90, 0.90, 0.90)), release="a-1")  # two standard errors of 100 questions: 6 %
NOISY = replace(judged((0.80, 0.90, 1.00)), release="a-1")


@pytest.mark.parametrize(
    ("scores", "floor", "known", "verdict", "why"),
    [
        ((0.9, 0.8, 1.0), None, None, "recorded", "90.0% of 100 answers right, spread 20.0%"),
        ((0.9, 0.9, 0.9), 0.9, None, "pass", "90.0%"),
        ((0.8, 0.8, 0.8), 0.81, None, "fail", "80.0% of 100 answers are right, the floor is 81.0%"),
        ((0.85, 0.85, 0.85), None, KNOWN, "pass", "85.0%"),
        ((0.83, 0.83, 0.83), None, KNOWN, "fail", "a-1 had 90.0%, and noise explains 6.0%"),
        ((0.83, 0.83, 0.83), None, NOISY, "pass", "83.0%"),
        ((0.90, 0.10, 0.20), None, KNOWN, "fail", "40.0% of 100 answers are right, a-1 had 90.0%"),
        ((0.1, 0.1, 0.1), None, replace(KNOWN, key="other"), "recorded", "10.0%"),
        ((0.97, 0.97, 0.97), None, KNOWN, "pass", "97.0%"),
    ],
)
def test_judged(
    scores: tuple[float, ...], floor: float | None, known: AccuracyVerdict | None, verdict: str, why: str
) -> None:
    found = judged(scores, floor, known)
    assert (found.verdict, found.scores) == (verdict, scores)
    assert why in found.why


@pytest.mark.parametrize("said", ["nan", "", "no number"])
def test_what_is_no_score(said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = subprocess.CompletedProcess([], 0, said + "\n", "ValueError: bad question")
    monkeypatch.setattr(accuracy.engine, "run", lambda *_others: done)
    monkeypatch.setattr(accuracy.engine, "scratch", lambda _plan: contextlib.nullcontext(str(tmp_path)))
    with pytest.raises(Failed, match="the evaluator gave no score: ValueError: bad question"):
        accuracy.run(PLAN, Accuracy("/q"), "", 5)
