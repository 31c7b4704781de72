from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import browser
import pytest
import recorded
from browser import Browser

from kernelswap.agent import evidence
from kernelswap.protocol import Evidence, decode, encode
from kernelswap.report.data import Story, story


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str], Story]:
    """The story of a recorded case, through all that carries it: the host's files, the agent's answer, its JSON."""

    def tell(case: str) -> Story:
        answer = evidence.find([recorded.host(tmp_path / case, case)], "")
        return story("gpu-01", decode(Evidence, encode(answer)))

    return tell


@pytest.fixture(scope="session")
def program() -> str:
    found = browser.find()
    if found is None:
        pytest.skip(f"no browser here, and nobody who could install {browser.BROWSERS[0]}")
    return found


@pytest.fixture
def screen(program: str, tmp_path: Path) -> Browser:
    return Browser(program, tmp_path)
