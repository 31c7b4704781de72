"""docs/faults.md is of today's matrix."""

import os
from pathlib import Path

import pytest
from test_kill import MOMENTS

PAGE = Path(__file__).parents[3] / "docs/faults.md"


@pytest.mark.skipif("KERNELSWAP_FAULTS_SUMMARY" in os.environ, reason="it is being written")
def test_the_page_has_the_moments_of_the_matrix() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("| moment |")[2].splitlines()[2:]
    shown = [line.split(" | ")[0].lstrip("| ") for line in lines[: lines.index("")]]
    assert shown == [moment.name for moment in MOMENTS], "make test-faults writes it anew"
