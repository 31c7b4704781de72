"""What is garbled in a text, by its looks alone. Numbers and names: knowledge/garbled.json.

No threshold fits every model: a small base model loops where a large one does not. So one text proves nothing; `excess`
says how many of a server's texts are too many.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any, Dict, Optional, Sequence, Set, Tuple

from kernelswap.agent import knowledge

REPLACEMENT = "\ufffd"


@cache
def load() -> Dict[str, Any]:
    data: Dict[str, Any] = json.loads(knowledge.read("garbled.json"))
    data["script"] = {word: name for name, words in data["scripts"].items() for word in words}
    return data


def kind(text: str, tokens: Optional[int] = None) -> str:
    """The kind of garbage that a text is, "" for none. tokens: how many it has, where known."""
    text = text.strip()
    if not text:
        return "empty"
    if tokens == 1:
        return "one-token"
    tests = (("replacement", _is_replaced), ("collapse", _is_collapsed), ("loop", _loops), ("salad", _is_salad))
    return next((name for name, test in tests if test(text, load()["kinds"][name])), "")


def excess(kinds: Sequence[str], allowed: float, known: Optional[float]) -> str:
    """What is wrong with a server that wrote texts of these kinds, "" if nothing is.

    allowed: the share that may be garbled. known: the share of the known-good's when it was committed; a server may
    garble as many, and what chance adds.
    """
    limits = load()["limits"]
    odd = [name for name in kinds if name]
    limit = max(allowed, (known or 0.0) + limits["above"])
    if len(odd) < limits["least"] or len(odd) <= limit * len(kinds):
        return ""
    worst = max(set(odd), key=odd.count)
    than = "" if known is None else f"; of the known-good's {100 * known:.0f} % were"
    return f"{len(odd)} of {len(kinds)} texts are garbled, most of them {load()['kinds'][worst]['what']}{than}"


def _is_replaced(text: str, limits: Dict[str, Any]) -> bool:
    text = text.rstrip(REPLACEMENT)  # the last character may have been cut
    broken = sum(char == REPLACEMENT or unicodedata.category(char) in ("Cc", "Cn", "Co") for char in text)
    broken -= sum(char in "\n\r\t" for char in text)
    return not text or bool(broken >= max(limits["least"], limits["share"] * len(text)))


def _is_collapsed(text: str, limits: Dict[str, Any]) -> bool:
    signs = [char for char in text if not char.isspace()]
    most = max(set(signs), key=signs.count)
    times = signs.count(most)
    return not most.isalnum() and times >= limits["least"] and times >= limits["share"] * len(signs)


def _loops(text: str, limits: Dict[str, Any]) -> bool:
    """Whether most of a text is one short piece, repeated; of numbers alone, as in 1000000, that is no fault."""
    for period in range(1, min(limits["period"], len(text) // 2) + 1):
        start, length = _longest(text, period)
        times = length // period
        piece = text[start : start + period]
        size = len(text[start : start + length].encode("utf-8", "replace"))
        enough = times >= limits["many"] or (times >= limits["times"] and size >= limits["bytes"])
        if (
            enough
            and length >= limits["share"] * len(text)
            and any(char.isalpha() or ord(char) > 0x2000 for char in piece)
        ):
            return True
    return False


def _longest(text: str, period: int) -> Tuple[int, int]:
    """Where the longest stretch with this period begins, and its length."""
    best, length = (0, 0), period
    for index in range(period, len(text)):
        length = length + 1 if text[index] == text[index - period] else period
        if length > best[1]:
            best = (index - length + 1, length)
    return best


def _is_salad(text: str, limits: Dict[str, Any]) -> bool:
    """Whether scripts change within sentences.

    A technical text mixes Latin with another script, and a list or glossary has one script after the other: only
    changes with nothing but spaces between count, among three scripts beside Latin and Greek, or within words.
    """
    free = load()["free"]
    changes = inside = 0
    seen: Set[str] = set()
    last, in_word = "", False
    for char in text:
        if char.isalpha():
            script = _script(char)
            if last not in ("", script):
                inside += in_word and "east-asian" not in (last, script)
                if last not in free and script not in free:
                    seen |= {last, script}
                changes += 1
            last, in_word = script, True
        elif char.isspace() and char != "\n":
            in_word = False
        elif unicodedata.category(char) not in ("Mn", "Mc", "Cf"):
            last, in_word = "", False
    enough = max(limits["least"], limits["share"] * len(text.split()))
    return bool(inside >= enough or (changes >= enough and len(seen) >= limits["scripts"]))


@cache
def _script(char: str) -> str:
    word = unicodedata.name(char, "OTHER").split(" ")[0]
    return str(load()["script"].get(word, "latin" if char.isascii() else word.lower()))
