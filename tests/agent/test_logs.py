from __future__ import annotations

import io
import json

import pytest

from kernelswap.agent import logs

PLAIN = "[2026-11-30 02:30:00 DP0 TP3]   File x.py"


@pytest.mark.parametrize(
    ("raw", "source", "rank", "logged", "level", "text"),
    [
        (PLAIN, "", "DP0 TP3", True, "", "  File x.py"),
        ("plain text", "", "", False, "", "plain text"),
        (f"Nov 30 02:30:00 gpu1 python3[12]: {PLAIN}", "python3[12]", "DP0 TP3", True, "", "  File x.py"),
        (f"2026-11-30T02:30:00+0000 gpu1 python3[12]: {PLAIN}", "python3[12]", "DP0 TP3", True, "", "  File x.py"),
        (f"Nov 30 02:30:00.123456 gpu1 python3[12]: {PLAIN}", "python3[12]", "DP0 TP3", True, "", "  File x.py"),
        (f"Mon 2026-11-30 02:30:00 UTC gpu1 python3[12]: {PLAIN}", "python3[12]", "DP0 TP3", True, "", "  File x.py"),
        (f"sglang-1  | {PLAIN}", "sglang-1", "DP0 TP3", True, "", "  File x.py"),
        (f"2026-11-30T02:30:00.123456789Z stderr F {PLAIN}", "", "DP0 TP3", True, "", "  File x.py"),
        (json.dumps({"log": PLAIN + "\n", "stream": "stderr", "time": "x"}), "", "DP0 TP3", True, "", "  File x.py"),
        (
            json.dumps({"MESSAGE": PLAIN, "SYSLOG_IDENTIFIER": "a", "_PID": "1"}),
            "a[1]",
            "DP0 TP3",
            True,
            "",
            "  File x.py",
        ),
        (json.dumps({"MESSAGE": list(b"\x1b[31mred\x1b[0m"), "_PID": "1"}), "[1]", "", False, "", "red"),
        ("(SGLangEngine pid=7) [rank3]: KeyError: 1", "(SGLangEngine pid=7)", "rank3", False, "", "KeyError: 1"),
        ("(A pid=1) ERROR 11-30 20:13:01 [core.py:868]   File x", "(A pid=1)", "", True, "ERROR", "  File x"),
        ("[2026-11-30 02:30:00] INFO:     hello", "", "", True, "INFO", "hello"),
        ("2026-11-30 02:30:00,853 - INFO - flashinfer.jit: hello", "", "", True, "INFO", "flashinfer.jit: hello"),
        ("[  812.334101] NVRM: Xid", "", "", False, "", "NVRM: Xid"),
        ("[Wed Jun 24 15:44:42 2026] NVRM: Xid", "", "", False, "", "NVRM: Xid"),
        ("Mon Nov 30 02:30:00 2026[1,3]<stderr>:  File x.py", "[1,3]", "", False, "", " File x.py"),
        (f"3: {PLAIN}", "3", "DP0 TP3", True, "", "  File x.py"),
        (f"ERROR 2026-11-30T02:30:00.317871332Z {PLAIN}", "", "DP0 TP3", True, "", "  File x.py"),
        (f"Nov 30, 2026 @ 02:30:00.892    {PLAIN}", "", "DP0 TP3", True, "", "  File x.py"),
        ("sglang-1  | 2026-11-30 02:30:00 | ERROR | stderr | KeyError: 1", "sglang-1", "", False, "", "KeyError: 1"),
        (f"2026-11-30 02:30:00,853 - __main__ - INFO - {PLAIN}", "", "DP0 TP3", True, "", "  File x.py"),
        (f"> {PLAIN}", "", "DP0 TP3", True, "", "  File x.py"),
        (f"(A pid=1) {PLAIN} [repeated 2x across cluster]", "(A pid=1)", "DP0 TP3", True, "", "  File x.py"),
        (f"Nov 30 02:30:00 gpu1 docker[9]: sglang-1  | {PLAIN}", "sglang-1", "DP0 TP3", True, "", "  File x.py"),
        ("ERROR | hello", "", "", True, "ERROR", "hello"),
        ("[11-30 02:30:00] hello", "", "", True, "", "hello"),
        ("Nov 30 02:30:00 gpu1 kernel: NVRM: Xid", "kernel", "", False, "", "NVRM: Xid"),
    ],
)
def test_a_line_without_its_wrapping(raw: str, source: str, rank: str, logged: bool, level: str, text: str) -> None:
    assert list(logs.parse(7, raw)) == [logs.Line(7, source, rank, logged, level, text)]


def test_what_is_glued_together_is_taken_apart() -> None:
    bar = "Capturing:  50%|#| 1/2 [00:01<00:01,  1.00it/s]"
    found = [line.text for line in logs.parse(1, f"{bar}\r{bar}Traceback (most recent call last):")]
    assert found == [bar, bar, "Traceback (most recent call last):"]
    two = '[2026-11-30 02:30:00] a 200 -"[2026-11-30 02:30:01 TP1] b'
    assert [(line.rank, line.text) for line in logs.parse(1, two)] == [("", 'a 200 -"'), ("TP1", "b")]


def test_reading_keeps_the_ends_of_a_long_line_and_counts_right() -> None:
    stream = io.BytesIO(b"a" * (5 * logs.LIMIT) + b"end\nsecond\n\nfourth")
    lines = list(logs.read(stream))
    assert len(lines) == 4
    assert len(lines[0]) < 3 * logs.LIMIT
    assert lines[0].endswith("end\n")
    assert lines[3] == "fourth"


def test_reading_asks_for_no_more_than_it_needs() -> None:
    class Endless(io.RawIOBase):
        """More than any memory; reading it whole would not end."""

        asked = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= logs.LIMIT
            self.asked += 1
            return b"quiet\n"

    stream = Endless()
    lines = logs.read(stream)  # type: ignore[arg-type]
    assert [next(lines) for _ in range(3)] == ["quiet\n"] * 3
    assert stream.asked == 3
