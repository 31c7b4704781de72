from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelswap.agent.verify import garbled

TEXTS = json.loads((Path(__file__).parent / "texts.json").read_text(encoding="utf-8"))["texts"]


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: f"{case['kind'] or 'sound'}: {case['name']}")
def test_kinds(case: dict[str, str]) -> None:
    assert garbled.kind(case["text"]) == case["kind"]


def test_a_single_token() -> None:
    assert garbled.kind("The", 1) == "one-token"
    assert garbled.kind("The", 2) == ""


@pytest.mark.parametrize(
    ("odd", "of", "allowed", "known", "wrong"),
    [
        (0, 16, 0.5, None, False),
        (8, 16, 0.5, None, False),
        (9, 16, 0.5, None, True),
        (9, 16, 1.0, None, False),
        (3, 3, 0.5, None, False),  # too few to tell
        (9, 16, 0.5, 0.0, True),
        (12, 16, 0.5, 0.5, False),  # a poor model is known to be one
        (16, 16, 0.5, 0.5, True),
        (16, 16, 0.5, 0.9, False),
        (4, 16, 0.1, 0.0, False),  # chance: the prompts are new each time
        (6, 16, 0.1, 0.0, True),
    ],
)
def test_how_many_are_too_many(odd: int, of: int, allowed: float, known: float | None, wrong: bool) -> None:
    kinds = ["loop"] * odd + [""] * (of - odd)
    assert bool(garbled.excess(kinds, allowed, known)) == wrong


def test_the_words() -> None:
    text = garbled.excess(["loop", "loop", "loop", "empty", "", ""], 0.5, 0.125)
    assert (
        text
        == "4 of 6 texts are garbled, most of them the same few letters over and over; of the known-good's 12 % were"
    )
