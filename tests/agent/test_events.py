from __future__ import annotations

from pathlib import Path

from kernelswap.agent.events import Events, render
from kernelswap.protocol import Event


def test_follow_gives_whole_events_only(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    following = events.follow(poll=0)
    assert next(following) is None
    events.emit("ready", "progress", "日本 30 s")
    events.emit("ready", "end", "ok", 12.34)
    assert next(following).text == "日本 30 s"  # type: ignore[union-attr]
    assert next(following).seconds == 12.34  # type: ignore[union-attr]
    line = (tmp_path / "events.jsonl").read_text().splitlines()[0]
    with events.path.open("a") as file:
        file.write(line[:20])
    assert next(following) is None
    with events.path.open("a") as file:
        file.write(line[20:] + "\n")
    assert next(following).text == "日本 30 s"  # type: ignore[union-attr]


def test_follow_skips_a_torn_line(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    events.emit("ready", "progress", "日本")
    whole = events.path.read_bytes()
    events.path.write_bytes(whole[: whole.index("日".encode()) + 1] + b"\0\0")
    events.emit("ready", "end", "ok", 12.34)
    assert next(events.follow(poll=0)).text == "ok"  # type: ignore[union-attr]


def test_render() -> None:
    assert render(Event(0, "ready", "begin")) is None
    assert render(Event(0, "ready", "end", "port 30000", 12.3)) == "ready          12.3 s  port 30000"
    assert render(Event(0, "smoke", "failed", "no tokens", 1.0)) == "smoke           1.0 s  FAILED: no tokens"
    assert render(Event(0, "result", "result", "committed x")) == "committed x"
