"""Pages as a browser shows them: nothing to complain of, the verdict and its figures where nobody has to scroll."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import recorded
from browser import Browser

from kernelswap.differences import Value
from kernelswap.protocol import Cause, HostFault
from kernelswap.report.data import Story
from kernelswap.report.page import page

LONG = "; ".join(f"GPU {gpu}: 41213 MiB are held by python3 (pid {5120 + gpu} of bob): end it" for gpu in range(40))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_verdict_and_its_figures_need_no_scrolling(
    told: Callable[[str], Story], screen: Browser, width: int, height: int
) -> None:
    pages = {case: page(told(case)) for case in recorded.CASES}
    long = told("refused")
    assert long.report.cause is not None
    cause = replace(long.report.cause, what=LONG, faults=())
    pages["long"] = page(replace(long, report=replace(long.report, cause=cause)))
    seen, console = screen.look(pages, width, height)
    assert console == ""
    for name, found in seen.items():
        assert 0 < found["verdict"] < found["figures"] <= height, name
        assert found["wide"] <= width, name
        assert found["scripts"] == found["handlers"] == 0
    assert seen["committed"]["charts"] == 5
    assert seen["refused"]["charts"] == 0


HOSTILE = "</title></style></text></svg><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'{{7*7}}"


def test_what_a_host_says_stays_text(told: Callable[[str], Story], screen: Browser) -> None:
    story = told("committed")
    assert story.throughput is not None
    assert story.drift is not None

    def spoil(value: Any, **changes: Any) -> Any:
        return replace(value, **changes)

    spoiled = spoil(
        story,
        host=HOSTILE,
        report=spoil(
            story.report,
            request=spoil(story.report.request, who=HOSTILE, reason=HOSTILE, command=HOSTILE, release=HOSTILE),
            cause=Cause(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, faults=(HostFault(HOSTILE, HOSTILE),) * 2),
            previous=HOSTILE, serving=HOSTILE, detail=HOSTILE, evidence=HOSTILE,
        ),
        steps=tuple(spoil(step, name=HOSTILE, detail=HOSTILE) for step in story.steps),
        throughput=spoil(story.throughput, why=HOSTILE, verdict=HOSTILE,
                         baseline=spoil(story.throughput.baseline, release=HOSTILE)),
        drift=spoil(story.drift, why=HOSTILE, against=HOSTILE, verdict=HOSTILE),
        changes=tuple(spoil(c, name=HOSTILE, before=Value(HOSTILE), after=Value(None, HOSTILE)) for c in story.changes),
        samples=tuple(spoil(sample, gpu=HOSTILE * (sample.gpu == "5") or sample.gpu) for sample in story.samples),
        phases=tuple(spoil(phase, name=HOSTILE) for phase in story.phases),
        gpus=tuple(spoil(gpu, gpu=HOSTILE, throttle=(HOSTILE,)) for gpu in story.gpus),
        findings=tuple(spoil(finding, headline=HOSTILE, next=(HOSTILE, HOSTILE), alternatives=(HOSTILE,), phase=HOSTILE)
                       for finding in story.findings),
        notes=(HOSTILE,), log=(HOSTILE,), unread=(HOSTILE,),
    )  # fmt: skip
    text = page(spoiled)
    assert "<script" not in text
    assert "<img" not in text
    seen, console = screen.look({"hostile": text}, 1280, 800)
    assert console == ""
    assert seen["hostile"]["scripts"] == seen["hostile"]["handlers"] == 0
    assert seen["hostile"]["title"].startswith(f"Committed: {HOSTILE}")
