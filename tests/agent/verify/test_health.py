from __future__ import annotations

import pytest

from kernelswap.agent.verify import health

READY = "[2026-11-30 10:00:00] The server is fired up and ready to roll!"
ALIVE = '[2026-11-30 10:00:01] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.34 GiB."
TRACEBACK = ["[2026-11-30 10:00:02 TP0] Traceback (most recent call last):", '  File "a.py", line 1, in f']


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([READY, ALIVE], ""),
        ([*TRACEBACK, OOM, READY, ALIVE], ""),  # before it was ready: it came up all the same
        ([READY, ALIVE, *TRACEBACK, OOM], "CUDA out of memory"),
        (
            [READY, "[2026-11-30 10:00:03 TP1] NaN detected in sampler: next_token_logits; values were sanitized"],
            "NaN detected in sampler",
        ),
        ([READY, *TRACEBACK, "RuntimeError: NCCL error: unhandled cuda error"], "NCCL error"),
        ([READY, "[2026-11-30 10:00:03] Exception in ASGI application", ALIVE], ""),
        ([READY, "[2026-11-30 10:00:03] ERROR: a client sent nonsense", ALIVE], ""),
        ([], ""),
    ],
)
def test_the_log_since_the_server_was_ready(lines: list[str], words: str) -> None:
    found = health.log_faults(lines)
    assert len(found) == bool(words)
    assert words in "".join(found)
