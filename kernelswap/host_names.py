"""How people sort, count and write hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence


def natural(name: str) -> tuple[list[str | int], str]:
    """A key that sorts gpu2 before gpu10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name


def many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names, key=natural))


def shortened(hosts: Sequence[str]) -> str:
    """Names as people write them: gpu[1-8], rack2-gpu[01-04,07].example."""
    runs: dict[tuple[str, str, int], list[int]] = {}
    for name in dict.fromkeys(hosts):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        before, digits, after = match.groups() if match else (name, "", "")
        width = len(digits) if digits.startswith("0") else 0
        runs.setdefault((before, after, width), []).extend([int(digits)] if digits else [])
    return ", ".join(_run(key, numbers) for key, numbers in _merged(runs))


def _merged(runs: Mapping[tuple[str, str, int], list[int]]) -> Iterator[tuple[tuple[str, str, int], list[int]]]:
    """08 and 10 are of one row: without a leading zero a number has any width that it fills."""
    padded = {(before, after, width) for before, after, width in runs if width}
    rows: dict[tuple[str, str, int], list[int]] = {}
    for (before, after, width), numbers in runs.items():
        for number in numbers:
            fits = [w for b, a, w in padded if (b, a) == (before, after) and len(str(number)) == w]
            rows.setdefault((before, after, width or (fits[0] if fits else 0)), []).append(number)
        if not numbers:
            rows.setdefault((before, after, 0), [])
    yield from rows.items()


def _run(key: tuple[str, str, int], numbers: Sequence[int]) -> str:
    before, after, width = key
    if not numbers:
        return f"{before}{after}"
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{low:0{width}}" if low == high else f"{low:0{width}}-{high:0{width}}" for low, high in spans]
    if len(set(numbers)) == 1:
        return f"{before}{texts[0]}{after}"
    return f"{before}[{','.join(texts)}]{after}"
