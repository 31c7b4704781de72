"""The host's own addresses, and whether systemd can shut a unit off from all others."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from pathlib import Path
from typing import List

from kernelswap.protocol import PYTHON

# Exit code 3: the packet was refused, as it should be.
PROBE = """
import socket, sys
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9))
except PermissionError:
    sys.exit(3)
"""


def own_addresses() -> List[str]:
    """Every address of this host, loopback included. The ranks of one server talk over the others too."""
    v4 = re.findall(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    found = {ipaddress.ip_address(address) for address in v4}
    v6 = Path("/proc/net/if_inet6")
    if v6.exists():
        found |= {ipaddress.ip_address(int(line.split()[0], 16)) for line in v6.read_text().splitlines()}
    this_network = ipaddress.ip_network("0.0.0.0/8")
    others = sorted(str(address) for address in found if not address.is_loopback and address not in this_network)
    return ["127.0.0.0/8", "::1/128", *others]


def can_quarantine() -> bool:
    """Whether `IPAddressDeny=` works here: systemd goes on without a word where the kernel or cgroups lack it."""
    command = ["systemd-run", "--quiet", "--wait", "--collect", "--property=IPAddressDeny=any"]
    done = subprocess.run([*command, PYTHON, "-c", PROBE], capture_output=True, timeout=60, check=False)
    return done.returncode == 3
