"""Runs on a host: takes port 30000 as soon as it is free and a swap is at a step. Words: seconds to keep it, step."""

import contextlib
import socket
import sys
import time
from pathlib import Path

JOURNAL = Path("/var/lib/kernelswap/main/journal.json")
seconds, step = float(sys.argv[1]), f'"step":"{sys.argv[2]}"'

while not JOURNAL.exists() or step not in JOURNAL.read_text():
    time.sleep(0.002)
while True:
    with contextlib.suppress(OSError), socket.create_server(("0.0.0.0", 30000)):
        time.sleep(seconds)
        break
    time.sleep(0.001)
