from __future__ import annotations

import ipaddress
import socket

from kernelswap.agent import network


def test_own_addresses_can_be_bound_and_hold_no_loopback() -> None:
    loopback, loopback6, *found = network.own_addresses()
    assert (loopback, loopback6) == ("127.0.0.0/8", "::1/128")
    for address in found:
        parsed = ipaddress.ip_address(address)
        assert not parsed.is_loopback
        if parsed.version == 4:
            with socket.socket() as probe:
                probe.bind((address, 0))
    # The address that this machine would use towards the outside is one of them.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return
        assert probe.getsockname()[0] in found
