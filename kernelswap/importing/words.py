"""Words of a command line that remember where they stood and what in them cannot be known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kernelswap.errors import ConfigError, Fault


@dataclass(frozen=True)
class Word:
    """One word as the process gets it.

    raw: as it was written, quotes included. unknown: the variables and substitutions in it whose value is not in the
    text; they stand in `text` as they were written. bare: it is nothing but one of these, unquoted, so it may vanish.
    """

    text: str
    line: int
    raw: str = ""
    unknown: tuple[str, ...] = ()
    bare: bool = False


@dataclass
class Source:
    """The text that is imported, and what there is to say about it."""

    name: str
    findings: list[Fault] = field(default_factory=list)
    refusals: list[Fault] = field(default_factory=list)

    def where(self, line: int) -> str:
        return f"{self.name}:{line}"

    def find(self, line: int, what: str, todo: str) -> None:
        self.findings.append(Fault(self.where(line), what, todo))

    def refuse(self, line: int, what: str, todo: str) -> None:
        """Goes on, so that every reason is told at once; `raise_refusals` ends it."""
        self.refusals.append(Fault(self.where(line), what, todo))

    def raise_refusals(self) -> None:
        if self.refusals:
            raise ConfigError(self.refusals)


@dataclass(frozen=True)
class Command:
    """One command of a script. environment: what is exported to it. folder: where it runs, if known."""

    words: tuple[Word, ...]
    environment: dict[str, Word] = field(default_factory=dict)
    folder: str | None = None
    python: str | None = None
    label: str = ""
    redirects: tuple[Word, ...] = ()

    @property
    def line(self) -> int:
        return self.words[0].line if self.words else 0


_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " ", '"': '"', "'": "'"}


def split(text: str, line: int, escapes: bool = False, relaxed: bool = False) -> Iterator[Word]:
    """Words as Compose splits them (quotes and backslashes, nothing else), or with `escapes` as systemd does.

    A newline in the text stands for itself, so that words know their lines. Raises ValueError for an open quote; with
    `relaxed`, as systemd splits a variable's value (EXTRACT_RELAX), the end of the text closes it.
    """
    position = 0
    while position < len(text):
        if text[position].isspace():
            line += text[position] == "\n"
            position += 1
            continue
        start, first, pieces, quote = position, line, [], ""
        while position < len(text) and (quote or not text[position].isspace()):
            char = text[position]
            line += char == "\n"
            position += 1
            if char == quote:
                quote = ""
            elif not quote and char in "\"'":
                quote = char
            elif char == "\\" and position < len(text) and (escapes or quote != "'"):
                piece, length = _escape(text[position:], bool(quote), escapes)
                pieces.append(piece)
                position += length
            else:
                pieces.append(char)
        if quote and not relaxed:
            raise ValueError(f"a {quote} that never ends")
        yield Word("".join(pieces), first, text[start:position])


def _escape(rest: str, quoted: bool, systemd: bool) -> tuple[str, int]:
    """What a backslash before `rest` means, and how many characters of `rest` it takes."""
    if rest[0] == "\n":
        return "", 1
    if not systemd:
        return (rest[0] if not quoted or rest[0] in '"\\$`' else "\\" + rest[0]), 1
    if match := re.match(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})", rest):
        digits = match[1] or match[2] or match[3]
        return chr(int(digits, 16) if digits else int(match[4], 8)), len(match[0])
    return _ESCAPES.get(rest[0], rest[0] if rest[0] == "\\" else "\\" + rest[0]), 1


_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?:(:?[-?+])([^}]*))?\}|([A-Za-z_]\w*))")


def interpolate(word: Word, lookup: Callable[[str], str | None], assumed: Callable[[str], None]) -> Word:
    """`$X`, `${X}` and `$$` replaced as Compose and systemd do; assumed: told of every default that is taken."""
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[5]
        found = lookup(name)
        if (match[3] or "").endswith("+"):
            return match[4] if found else ""
        if found is not None:
            return found
        if (match[3] or "").endswith("-"):
            assumed(name)
            return match[4]
        unknown.append(match[0])
        return match[0]

    text = _VARIABLE.sub(value, word.text)
    bare = len(unknown) == 1 and text == unknown[0]
    return replace(word, text=text, unknown=(*word.unknown, *unknown), bare=bare)
