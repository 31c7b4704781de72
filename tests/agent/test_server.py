from __future__ import annotations

import pytest

from kernelswap.agent import server, units
from kernelswap.agent.client import Reply
from kernelswap.protocol import Answer, Plan


class Fake:
    """Answers a chat from a list; only what `_check_*` asks of a client."""

    def __init__(self, *texts: str, cut: bool = False) -> None:
        self.texts = list(texts)
        self.cut = cut

    def chat(self, prompt: str, max_tokens: int, timeout: float) -> Reply:
        return Reply(self.texts.pop(0), self.cut)


@pytest.mark.parametrize(
    ("texts", "faults"),
    [
        (("a", "a", "a"), 0),
        (("cold", "warm", "warm"), 0),  # the first fills the prefix cache; another kernel shape is no fault
        (("a", "b", "c"), 1),
        (("", "", ""), 1),
    ],
)
def test_the_same_answer_twice(texts: tuple[str, ...], faults: int) -> None:
    assert len(server._check_chat(Fake(*texts), 9)) == faults  # type: ignore[arg-type]


def test_a_thought_that_was_cut_says_so() -> None:
    answer = Answer("2+2", r"\b4\b", 64)
    assert server._check_answer(Fake("it is 4."), answer, 9) == []  # type: ignore[arg-type]
    (fault,) = server._check_answer(Fake("Let me think", cut=True), answer, 9)  # type: ignore[arg-type]
    assert "cut at max-tokens 64" in fault


@pytest.mark.parametrize(("result", "blame"), [("oom-kill", "host"), ("timeout", "host"), ("exit-code", "release")])
def test_who_is_to_blame_for_an_end_without_a_word(result: str, blame: str) -> None:
    status = units.UnitStatus("failed", "failed", 0, "", False, "", result, None)
    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "0.0.0.0", 30000)
    assert server.unit_failure(plan, status, "it ended").cause.blame == blame
