"""Asks a server for one token every 20 ms and notes when a right answer came. Runs on the controller and on hosts.

    python3 probe.py ADDRESS PORT SECONDS

Prints, for each answer, when it was there (seconds of CLOCK_MONOTONIC, as systemd's own time stamps), a line each.
Every attempt has a connection of its own, so that one whose packets were dropped delays no other; of those that are
connected only a few wait at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

EVERY = 0.02
PATIENCE = 10.0  # seconds for an answer
CONNECTED = 3  # requests that wait at once
BODY = json.dumps({"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
REQUEST = (
    "POST /generate HTTP/1.1\r\nHost: probe\r\nContent-Type: application/json\r\nConnection: close\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}"
).encode()


async def ask(address: str, port: int, room: asyncio.Semaphore) -> None:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), 1)
    except OSError:
        return
    try:
        if room.locked():
            return
        async with room:
            writer.write(REQUEST)
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
        status, _, body = answer.partition(b"\r\n")
        if b" 200 " in status and b'"text":' in body and b'"completion_tokens":1' in body.replace(b" ", b""):
            print(f"{time.monotonic():.4f}", flush=True)
    except OSError:
        return
    finally:
        writer.close()


async def main(address: str, port: int, seconds: float) -> None:
    room = asyncio.Semaphore(CONNECTED)
    running = set()
    until = time.monotonic() + seconds
    while (now := time.monotonic()) < until:
        task = asyncio.ensure_future(ask(address, port, room))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.sleep(EVERY - now % EVERY)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
