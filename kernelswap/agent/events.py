"""A swap's progress: written to a file by the agent, read from it by whoever follows."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional

from kernelswap.agent import files
from kernelswap.protocol import Event, decode, encode


@dataclass(frozen=True)
class Events:
    """The events of one swap, a JSON line each."""

    path: Path

    def emit(self, step: str, kind: str, text: str = "", seconds: Optional[float] = None) -> None:
        """Add an event. A full disk loses it: what is told must not decide what is done."""
        with contextlib.suppress(OSError):
            files.append(self.path, encode(Event(time.time(), step, kind, text, seconds)), synced=False)

    def follow(self, poll: float = 0.2) -> Iterator[Optional[Event]]:
        """Events from the first on as they come; None at every poll that brought nothing. Never ends by itself.

        A line torn by a power cut is skipped.
        """
        rest = b""
        position = 0
        while True:
            chunk = b""
            if self.path.exists():
                with self.path.open("rb") as file:
                    file.seek(position)
                    chunk = file.read()
                    position = file.tell()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    yield decode(Event, line.decode())
            if not lines:
                yield None
                time.sleep(poll)


def render(event: Event) -> Optional[str]:
    """The line that a person reads; None for an event that only programs need."""
    if event.kind == "begin":
        return None
    if event.kind == "end":
        return f"{event.step:<12}{event.seconds or 0:7.1f} s  {event.text}".rstrip()
    if event.kind == "failed":
        return f"{event.step:<12}{event.seconds or 0:7.1f} s  FAILED: {event.text}"
    if event.kind == "progress":
        return f"{event.step:<12}    ...    {event.text}"
    return f"note: {event.text}" if event.kind == "note" else event.text
