"""What no sound server does, whatever its model: judged on greedy answers of the native endpoint, with logprobs."""

from __future__ import annotations

import re
from typing import List, Optional, Sequence

from kernelswap.agent.client import Choice, Generated, Token

TIE = 0.05  # nats between two logprobs of one forward pass that rounding may swap
NEAR = 0.5  # nats between two choices of which another run of the same kernels may take the other
SURE = 0.001  # nats: a model that is so sure of each token gives equal logprobs without being broken
ENOUGH = 8  # tokens from which on equal logprobs are no chance
FASTEST = 20_000  # tokens per second of one stream; the fastest engines published reach a tenth
TOP = 5


def faults(answer: Generated, asked: int) -> List[str]:
    """asked: how many tokens, the model's own end ignored."""
    tokens = answer.tokens
    if not tokens:
        return ["no tokens came back"]
    return [fault for fault in (_count(answer, asked), _logprobs(tokens), _greedy(tokens), _text(answer)) if fault]


def _count(answer: Generated, asked: int) -> str:
    got = len(answer.tokens) if answer.count in (None, asked) else answer.count
    if got != asked:
        return f"{asked} tokens were asked for, {got} came"
    if asked >= ENOUGH and asked > FASTEST * answer.seconds:
        return f"{asked} tokens within {1000 * answer.seconds:.1f} ms: nothing was generated"
    return ""


def _logprobs(tokens: Sequence[Token]) -> str:
    values = [token.logprob for token in tokens]
    bad = sum(value is None or value > TIE for value in values)
    if bad:
        return f"{bad} of {len(values)} logprobs are not finite, or of no probability"
    if len(values) >= ENOUGH and len(set(values)) == 1 and (values[0] or 0) < -SURE:
        return f"all {len(values)} logprobs are {values[0]:.3f}: the model chose blindly"
    return ""


def _greedy(tokens: Sequence[Token]) -> str:
    """A greedy token that is not the most probable one was corrupted after the model had chosen it."""
    wrong = [index for index, token in enumerate(tokens) if token.top and not _is_best(token)]
    if not wrong:
        return ""
    return f"{len(wrong)} of {len(tokens)} tokens (the first is number {wrong[0] + 1}) are not what the model chose"


def _is_best(token: Token) -> bool:
    best = max(logprob for logprob, _ in token.top)
    own = _logprob_of(token, token.id)
    return own is not None and own >= best - TIE


def _logprob_of(token: Token, wanted: int) -> Optional[float]:
    return next((logprob for logprob, name in token.top if name == wanted), None)


def _text(answer: Generated) -> str:
    """The text must be that of its tokens; blanks aside, which tokenizers treat differently at a word's begin.

    A token may be a part of a character: then it decodes alone to U+FFFD, or is written as its byte.
    """
    if any(token.text is None for token in answer.tokens):
        return ""
    pattern, parts = "", 0
    for token in answer.tokens:
        piece = "".join((token.text or "").split())
        if "\ufffd" in piece or re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            parts += len(piece)
            continue
        pattern += (f".{{0,{parts}}}" if parts else "") + re.escape(piece)
        parts = 0
    pattern += f".{{0,{parts}}}" if parts else ""
    if re.fullmatch(pattern, "".join(answer.text.split()), re.DOTALL):
        return ""
    spoken = "".join(token.text or "" for token in answer.tokens)
    return f"the text {answer.text[:60]!r} is not that of its tokens, {spoken[:60]!r}"


def parted(first: Generated, second: Generated) -> str:
    """Where two answers to one greedy prompt part although the model was sure; "" if they do not.

    At a near tie a sound GPU may choose differently; what follows then says nothing.
    """
    for index in range(min(len(first.tokens), len(second.tokens))):
        one, other = first.tokens[index], second.tokens[index]
        if one.id == other.id:
            continue
        gaps = [_gap(one, other.id), _gap(other, one.id)]
        if any(gap is not None and gap <= NEAR for gap in gaps):
            return ""
        return f"asked twice, the answers part at token {index + 1}, of which the model was sure"
    return ""


def tied(choices: Sequence[Choice], other: str) -> bool:
    """Whether another answer to the same greedy prompt is the same, or takes at one place a token that was nearly as
    probable as the chosen one, with the same text before it. Blanks aside, as above."""
    told, spoken, before = _bare(other), _bare("".join(choice.text for choice in choices)), ""
    part = next((at for at, (one, two) in enumerate(zip(told, spoken)) if one != two), min(len(told), len(spoken)))
    for choice in choices:
        best = max((logprob for logprob, _ in choice.top), default=0.0)
        near = [_bare(text) for logprob, text in choice.top if text != choice.text and logprob >= best - NEAR]
        if any(text and told.startswith(before + text) and part <= len(before + text) for text in near):
            return True
        before += _bare(choice.text)
    return bool(choices) and told == spoken


def _bare(text: str) -> str:
    return "".join(text.split())


def _gap(token: Token, other: int) -> Optional[float]:
    """How much more or less probable than its own choice the other one was; None if it was not among the best."""
    own, value = _logprob_of(token, token.id), _logprob_of(token, other)
    return None if own is None or value is None else abs(own - value)


def copied(answers: Sequence[Generated]) -> str:
    """Answers to different prompts with the same logprobs to the last digit were not computed."""
    rows = [tuple(token.logprob for token in answer.tokens) for answer in answers]
    known = [
        row for row in rows if len(row) >= ENOUGH and None not in row and sum(filter(None, row)) < -SURE * len(row)
    ]
    twice = len(known) - len(set(known))
    return f"{twice} answers to different prompts have exactly equal logprobs: they were not computed" if twice else ""
