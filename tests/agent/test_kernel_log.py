from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelswap.agent import kernel_log
from kernelswap.agent.kernel_log import Xid
from kernelswap.protocol import Gpu

LOGS = sorted((Path(__file__).parent / "kernel_logs").glob("*.log"))
NOW = 1764500000.0  # the afternoon of 2025-11-30, UTC
GPU = Gpu(0, "GPU-a", pci="0000:01:00")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_kernel_log_tells_which_gpu_failed_how_and_what_helps(path: Path) -> None:
    """The first line of a log is the verdict: time, address, Xid and the beginning of what helps."""
    first, *lines = path.read_text().splitlines()
    wanted = json.loads(first)
    found = kernel_log.parse(lines, NOW)
    assert [[int(xid.at), xid.pci, xid.code] for xid in found] == [row[:3] for row in wanted]
    for number, xid in enumerate(found):
        advice, words = str(kernel_log.gravest(GPU, [xid]) or ""), wanted[number][3]
        assert words in advice
        assert bool(advice) == bool(words)


def test_a_time_without_a_year_is_the_latest_that_has_been() -> None:
    line = "Dec 31 23:59:59 gpu1 kernel: NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    assert time.gmtime(kernel_log.parse([line], NOW)[0].at)[:2] == (2024, 12)


def test_the_gravest_error_decides() -> None:
    errors = [Xid(1.0, GPU.pci, 79, ""), Xid(2.0, GPU.pci, 43, ""), Xid(3.0, GPU.pci, 48, "")]
    assert str(kernel_log.gravest(GPU, errors)).startswith("the kernel log has Xid 79 at 1970-01-01 00:00:01 UTC")
    assert kernel_log.gravest(GPU, []) is None


def test_errors_of_a_gpu_that_cannot_say_where_it_is() -> None:
    here, elsewhere = Xid(1.0, GPU.pci, 79, ""), Xid(1.0, "0000:02:00", 79, "")
    lost = Gpu(1, error="GPU is lost")
    assert kernel_log.of(GPU, [GPU, lost], [here, elsewhere]) == [here]
    assert kernel_log.of(lost, [GPU, lost], [here, elsewhere]) == [elsewhere]


def test_every_known_error_has_an_action_and_somebody_to_blame() -> None:
    data = kernel_log.load()
    assert set(data["actions"]) == set(kernel_log.ACTIONS)
    for row in data["xids"]:
        assert row["action"] in kernel_log.ACTIONS
        assert row["blame"] in ("host", "release")


@pytest.mark.parametrize(
    ("code", "text", "fails", "blames_host"),
    [
        (31, "", True, False),
        (43, "", True, False),
        (63, "", False, False),
        (64, "", True, True),
        (92, "", False, False),
        (79, "", True, True),
        (154, "changed from 0x1 (GPU Reset Required) to 0x0 (None)", False, False),
        (999, "", True, False),
    ],
)
def test_what_an_error_means_for_a_server(code: int, text: str, fails: bool, blames_host: bool) -> None:
    xid = Xid(1.0, GPU.pci, code, text)
    assert (kernel_log.fails(xid), kernel_log.blames_host(xid)) == (fails, blames_host)


def test_the_errors_of_this_boot_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A syslog daemon writes again what the journal has."""
    now = int(time.time())
    line = "{} gpu1 kernel: NVRM: Xid (PCI:0000:01:00): {}, GPU has fallen off the bus."
    monkeypatch.setattr(kernel_log, "_journal", lambda: [line.format(f"{now - 5}.25", 79)])
    monkeypatch.setattr(kernel_log, "FILE", tmp_path / "kern.log")
    assert [xid.code for xid in kernel_log.xids()] == [79]
    again = time.strftime("%Y-%m-%dT%H:%M:%S.260000+00:00", time.gmtime(now - 5))
    old = line.format("2001-01-01T00:00:00.000000+00:00", 48)
    kernel_log.FILE.write_text("\n".join([old, line.format(again, 79), line.format(f"{now - 1}.5", 31)]))
    assert [xid.code for xid in kernel_log.xids()] == [79, 31]
    assert [xid.code for xid in kernel_log.xids(since=now - 2)] == [31]
