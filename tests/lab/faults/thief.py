"""Runs on a host: takes port 30000 as soon as it is free and keeps it for as many seconds as its first word says."""

import contextlib
import socket
import sys
import time

while True:
    with contextlib.suppress(OSError), socket.create_server(("0.0.0.0", 30000)):
        time.sleep(float(sys.argv[1]))
        break
    time.sleep(0.001)
