"""Hosts for the fault matrix: many, as each stands for one fault, and one pyinfra command swaps them all."""

import os
import uuid
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from labhost import own_lab
from summary import Matrix, page

HOSTS = 32
DISK = "256m"  # small, so that a test can fill it


MATRIX = pytest.StashKey[Matrix]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = Matrix()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.when == "call" and report.passed:
        for kind, value in report.user_properties:
            item.config.stash[MATRIX].add(kind, value)
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """KERNELSWAP_FAULTS_SUMMARY=FILE writes the summary there, if all went well."""
    path = os.environ.get("KERNELSWAP_FAULTS_SUMMARY")
    if path and exitstatus == 0:
        Path(path).write_text(page(session.config.stash[MATRIX]))


@pytest.fixture(scope="module")
def fleet(booted: Fleet) -> Fleet:
    return replace(booted, mark=uuid.uuid4().hex[:8])


@pytest.fixture(scope="session")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("faults") / "ops"
    folder.mkdir()
    with own_lab("-faults") as lab:
        with pytest.MonkeyPatch.context() as patch:  # other labs of this process have disks of the usual size
            patch.setenv("KERNELSWAP_LAB_DISK", DISK)
            lab.up(HOSTS)
        fleet = Fleet(lab, folder)
        fleet.prepare()
        yield fleet
