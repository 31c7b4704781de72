"""The lab of a test session: its own hosts, booted on first use and gone at the end.

Each process of pytest-xdist has a lab to itself, so no two tests touch one host at the same time. KERNELSWAP_KEEP_LAB=1
keeps the lab for the next session (and to look around: KERNELSWAP_LAB=.lab-tests/keep lab/lab.sh ssh gpu1).
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from labhost import ROOT, Host, Lab

HERE = Path(__file__).parent
FOLDER = ROOT / ".lab-tests"
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
    FOLDER.mkdir(exist_ok=True)
    keep = os.environ.get("KERNELSWAP_KEEP_LAB") == "1"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    name = f"keep{worker}" if keep else str(os.getpid())
    # The lock lives as long as this process: whoever gets it later knows that the lab was left behind.
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sweep()
        lab = Lab(FOLDER / name)
        try:
            lab.up(HOSTS)
            yield lab
        finally:
            if not keep:
                lab.down()
                (FOLDER / f"{name}.lock").unlink()


def sweep() -> None:
    """End the labs of sessions that were killed."""
    for path in FOLDER.glob("[0-9]*.lock"):
        with path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            Lab(path.with_suffix("")).down()
            path.unlink(missing_ok=True)


@pytest.fixture
def hosts(lab: Lab) -> list[Host]:
    return lab.hosts[:HOSTS]


@pytest.fixture
def host(hosts: list[Host]) -> Host:
    return hosts[0]
