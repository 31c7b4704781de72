from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kernelswap.agent.client import Generated, generated
from kernelswap.agent.verify import answers

WORDS = [" The", " river", " runs", " to", " the", " sea", " and", " on"]


def row(index: int, word: str) -> list[Any]:
    return [-0.1 * (index + 1), 100 + index, word]


def answer(words: Sequence[str] = WORDS, seconds: float = 1.0, **changes: Any) -> Generated:
    """A sound answer with the changes: rows by their index, or "text" and "count"."""
    rows = [changes.get(f"row{index}", row(index, word)) for index, word in enumerate(words)]
    tops = [[row(index, word), [-3.0, 7, " x"]] for index, word in enumerate(words)]
    meta = {"output_token_logprobs": rows, "output_top_logprobs": tops, "completion_tokens": changes.get("count", 8)}
    return generated({"text": changes.get("text", "".join(words)), "meta_info": meta}, seconds)


BYTES = [" ", "\ufffd", "\ufffd", "京", "<0xE4>", "<0xBA>", "<0xAC>", "!"]

SOUND = {
    "as it should be": answer(),
    "with the first blank trimmed": answer(text="The river runs to the sea and on"),
    "a near tie": answer(row3=[-0.42, 103, " to"]),
    "characters in parts": answer(BYTES, text=" 東京京!"),
    "characters in parts, the last cut": answer([*BYTES[:-1], "\ufffd"], text=" 東京"),
    "no texts of tokens": generated(
        {"text": "?", "meta_info": {"output_token_logprobs": [[-0.1 * n, n, None] for n in range(8)]}}, 1.0
    ),
    "surely said": generated(
        {"text": "?", "meta_info": {"output_token_logprobs": [[0.0, 5, None]] * 8, "completion_tokens": 8}}, 1.0
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound(name: str) -> None:
    assert answers.faults(SOUND[name], 8) == []


BROKEN = {
    "nothing": (generated({}, 1.0), "no tokens came back"),
    "an error": (generated({"meta_info": None, "text": None}, 1.0), "no tokens came back"),
    "too few": (answer(WORDS[:7], count=7), "8 tokens were asked for, 7 came"),
    "one": (answer(WORDS[:1], count=1), "8 tokens were asked for, 1 came"),
    "told too few": (answer(count=3), "8 tokens were asked for, 3 came"),
    "at once": (answer(seconds=0.0001), "nothing was generated"),
    "NaN as null": (answer(row2=[None, 102, " runs"]), "1 of 8 logprobs are not finite"),
    "NaN": (answer(row2=[float("nan"), 102, " runs"]), "1 of 8 logprobs are not finite"),
    "infinite": (answer(row2=[float("-inf"), 102, " runs"]), "1 of 8 logprobs are not finite"),
    "no number": (answer(row2=["-0.3", 102, " runs"]), "1 of 8 logprobs are not finite"),
    "no row": (answer(row2=None), "1 of 8 logprobs are not finite"),
    "more than certain": (answer(row2=[4.0, 102, " runs"]), "1 of 8 logprobs are not finite"),
    "blind": (
        generated({"text": "?", "meta_info": {"output_token_logprobs": [[-6.2, 0, None]] * 8}}, 1.0),
        "all 8 logprobs are -6.200",
    ),
    "a corrupted token": (
        answer(row2=[-3.0, 7, " x"], text=" The river x to the sea and on"),
        "are not what the model",
    ),
    "one from nowhere": (
        answer(row2=[-0.3, 55, " x"], text=" The river x to the sea and on"),
        "(the first is number 3)",
    ),
    "an empty text": (answer(text=""), "the text '' is not that of its tokens"),
    "another text": (answer(text="lock handle handle"), "is not that of its tokens"),
    "replaced": (answer(text=" T\ufffde river runs to the sea and on"), "is not that of its tokens"),
    "a broken character": (answer(BYTES, text=" 東Ã京!"[:2] + "Ã!"), "is not that of its tokens"),
    "more text": (answer(text="".join(WORDS) + " and"), "is not that of its tokens"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    reply, words = BROKEN[name]
    assert words in "; ".join(answers.faults(reply, 8))


def chosen(*rows: tuple[int, list[tuple[float, int]]]) -> Generated:
    """Tokens by their id and the most probable ones."""
    meta = {
        "output_token_logprobs": [[top[0][0], number, None] for number, top in rows],
        "output_top_logprobs": [[[logprob, name, None] for logprob, name in top] for _, top in rows],
    }
    return generated({"text": "", "meta_info": meta}, 1.0)


SURE = [(-0.1, 1), (-2.5, 2)]
TIED = [(-0.7, 1), (-0.8, 2)]


@pytest.mark.parametrize(
    ("first", "second", "parts"),
    [
        (chosen((1, SURE), (1, SURE)), chosen((1, SURE), (1, SURE)), False),
        (chosen((1, SURE), (1, SURE)), chosen((1, SURE), (2, SURE)), True),
        (chosen((1, SURE), (1, SURE)), chosen((1, SURE), (9, [(-0.1, 9), (-2.0, 8)])), True),
        (chosen((1, TIED), (1, SURE)), chosen((2, TIED), (2, SURE)), False),  # what follows a tie says nothing
        (chosen((1, SURE)), chosen((1, SURE), (2, SURE)), False),
    ],
)
def test_two_answers_to_one_prompt(first: Generated, second: Generated, parts: bool) -> None:
    assert bool(answers.parted(first, second)) == parts


def test_answers_that_were_not_computed() -> None:
    assert answers.copied([answer(), answer()]) == (
        "1 answers to different prompts have exactly equal logprobs: they were not computed"
    )
    assert answers.copied([answer(), answer(row0=[-0.11, 100, " The"])]) == ""
    assert answers.copied([SOUND["surely said"], SOUND["surely said"]]) == ""  # a loop of a small model
    assert answers.copied([answer(WORDS[:3]), answer(WORDS[:3])]) == ""
