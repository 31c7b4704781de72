"""The lab of a test session: its own hosts, booted on first use and gone at the end.

Each process of pytest-xdist has a lab to itself, so no two tests touch one host at the same time. KERNELSWAP_KEEP_LAB=1
keeps the lab for the next session (and to look around: KERNELSWAP_LAB=.lab-tests/keep lab/lab.sh ssh gpu1).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from labhost import Host, Lab, own_lab

HERE = Path(__file__).parent
HOSTS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="the lab needs root"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab with two hosts; a test that needs more says lab.up(n)."""
    with own_lab() as lab:
        lab.up(HOSTS)
        yield lab


@pytest.fixture
def hosts(lab: Lab) -> list[Host]:
    return lab.hosts[:HOSTS]


@pytest.fixture
def host(hosts: list[Host]) -> Host:
    return hosts[0]
