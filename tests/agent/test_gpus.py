from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from samples import plan

from kernelswap.agent import files, gpus
from kernelswap.agent.gpus import _Said as Said
from kernelswap.agent.kernel_log import Xid
from kernelswap.protocol import Gpu, encode

ONE = Gpu(0, "GPU-a", "RTX", "12.0", 97887, 4, pci="0000:01:00")
TWO = Gpu(1, "GPU-b", "RTX", "12.0", 97887, 90000, pids=(7, 8), pci="0000:02:00")
MIG = replace(TWO, uuid="MIG-1", parent="GPU-b")
GPUS = (ONE, TWO)
Tell = Callable[[Said], None]


@pytest.fixture(autouse=True)
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "silent.json"
    monkeypatch.setattr(gpus, "SILENT", path)
    monkeypatch.setattr(gpus.units, "set_apart", lambda pid, scope: None)  # this machine may have a systemd of its own
    yield path
    for silence in json.loads(files.read(path) or "[]"):
        os.kill(silence["pid"], signal.SIGKILL)


def test_the_child_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    many = (ONE, *(replace(MIG, uuid=f"MIG-{number}") for number in range(2000)))  # more than a pipe holds at once

    def query(tell: Tell, _: set[int]) -> None:
        tell(Said(count=2))
        tell(Said(gpus=(TWO,), done=True))
        tell(Said(gpus=many, done=True))

    monkeypatch.setattr(gpus, "_query", query)
    assert gpus.read() == (*many, TWO)


def test_a_driver_that_hangs_costs_its_limit_once(
    tmp_path: Path, silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(_: Tell, __: set[int]) -> None:
        while not (tmp_path / "over").exists():
            time.sleep(0.05)

    monkeypatch.setattr(gpus, "_query", query)
    with pytest.raises(gpus.GpuError, match=r"no answer within 0\.3 s"):
        gpus.read(0.3)
    start = time.monotonic()
    with pytest.raises(gpus.GpuError, match="no answer since 20"):
        gpus.read(60)
    assert time.monotonic() - start < 30
    (tmp_path / "over").touch()
    os.waitpid(json.loads(silent.read_text())[0]["pid"], 0)
    monkeypatch.setattr(gpus, "_query", lambda tell, without: tell(Said(count=1, gpus=(ONE,), done=True)))
    assert gpus.read(60) == (ONE,), "the query came back, so the driver is asked again"
    silent.unlink()


def test_a_gpu_that_hangs_is_named_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(tell: Tell, without: set[int]) -> None:
        tell(Said(count=3))
        tell(Said(gpus=(ONE,), done=True))
        if 1 not in without:
            tell(Said(gpus=(Gpu(1, "GPU-b"),)))  # it says who it is, then hangs, as the third does at once
            time.sleep(60)

    monkeypatch.setattr(gpus, "_query", query)
    first = gpus.read(2)
    assert first[0] == ONE
    assert [(gpu.index, gpu.uuid) for gpu in first[1:]] == [(1, "GPU-b"), (2, "")]
    assert all(gpu.error.startswith("no answer from NVML since 20") for gpu in first[1:])
    start = time.monotonic()
    assert gpus.read(30) == first
    assert time.monotonic() - start < 10


def test_an_abandoned_child_keeps_no_lock_and_no_output(tmp_path: Path, silent: Path) -> None:
    """Whoever runs us over SSH waits for the end of what we print, and the next swap for our lock."""
    script = (
        "import sys, time; from pathlib import Path; from kernelswap.agent import files, gpus\n"
        f"gpus.SILENT = Path({str(silent)!r}); gpus._query = lambda tell, without: time.sleep(60)\n"
        f"with files.lock(Path({str(tmp_path / 'lock')!r})):\n"
        "    try: gpus.read(0.2)\n    except gpus.GpuError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "NVML gives no answer within 0.2 s\n"
    assert not files.is_locked(tmp_path / "lock")
    assert json.loads(silent.read_text())[0]["gpus"] == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("raise RuntimeError('Driver/library version mismatch')", "version mismatch"),
        ("os._exit(11)", "ends whoever asks"),
    ],
)
def test_a_child_that_fails_says_why(query: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_query", lambda tell, without: exec(query))  # noqa: S102
    with pytest.raises(gpus.GpuError, match=error):
        gpus.read()


def test_a_child_that_hangs_at_its_end_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(pipe: int, without: set[int]) -> None:
        os.write(pipe, encode(Said(count=1, gpus=(ONE,), done=True)).encode() + b"\n")
        os.close(pipe)
        time.sleep(60)
        os._exit(0)

    children = []
    reap = gpus._reap
    monkeypatch.setattr(gpus, "_answer", answer)
    monkeypatch.setattr(gpus, "_reap", lambda child: children.append(child) or reap(child, patience=0.2))
    assert gpus.read(30) == (ONE,)
    os.kill(children[0], signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(children[0], 0)[1]) == signal.SIGKILL, "it was not waited for"


def test_assigned_by_index_or_uuid() -> None:
    assert gpus.assigned(GPUS, ()) == list(GPUS)
    assert gpus.assigned(GPUS, ("1",)) == [TWO]
    assert gpus.assigned(GPUS, ("GPU-a",)) == [ONE]


def test_a_divided_gpu_offers_its_devices_and_not_itself() -> None:
    divided = (ONE, replace(TWO, mig=True), MIG)
    assert gpus.assigned(divided, ()) == [ONE, MIG]
    assert gpus.assigned(divided, ("MIG-1",)) == [MIG]
    assert gpus.assigned(divided, ("1",)) == []


LOST = Gpu(2, error="GPU is lost")
HUNG = Gpu(3, "GPU-h", pci="0000:04:00", error="no answer from NVML since then")
BUS = Xid(1000.0, "0000:03:00", 79, "")


@pytest.mark.parametrize(
    ("present", "names", "says"),
    [
        (GPUS, ("GPU-a", "1"), []),
        (GPUS, ("7",), ["no GPU 7 on this host: it has 2: correct `gpus:`, or reboot the host if one is missing"]),
        ((*GPUS, LOST, HUNG), ("GPU-a", "1"), []),
        (
            (*GPUS, LOST),
            ("GPU-c",),
            ["no GPU GPU-c on this host: it has 3; GPU 2 may be it (GPU is lost): the kernel log has Xid 79 at "],
        ),
        ((*GPUS, HUNG), ("GPU-h",), ["GPU 3 GPU-h: no answer from NVML since then: reset it, or reboot the host"]),
        ((*GPUS, LOST), ("2",), ["GPU 2: GPU is lost: the kernel log has Xid 79 at "]),
        ((*GPUS, LOST), (), ["GPU 2: GPU is lost: the kernel log has Xid 79 at "]),
        ((replace(TWO, mig=True), MIG), ("1",), ["divided into MIG devices and offers only these: choose among MIG-1"]),
        ((replace(TWO, mig=True), MIG), ("MIG-1",), []),
        ((replace(TWO, mig=True),), ("GPU-b",), ["create some by `nvidia-smi mig`, or turn MIG off"]),
    ],
)
def test_why_an_instance_cannot_have_its_gpus(
    present: tuple[Gpu, ...], names: tuple[str, ...], says: list[str]
) -> None:
    found = gpus.faults(present, names, [BUS])
    assert len(found) == len(says)
    assert all(words in str(found[number]) for number, words in enumerate(says)), found


def test_pinned_gpus_are_numbered_as_cuda_counts_them_today() -> None:
    turned = (replace(ONE, pci="0000:09:00"), TWO)  # NVML may count otherwise
    assert gpus.numbering(turned, ("GPU-a", "GPU-b")) == "1,0"
    assert gpus.numbering(GPUS, ("GPU-b",)) == "1"
    assert gpus.numbering(GPUS, ("GPU-b", "GPU-x")) == ""
    assert gpus.numbering((*GPUS, LOST), ("GPU-b",)) == "", "CUDA leaves the lost one out, and who knows what else"
    assert gpus.numbering((replace(TWO, mig=True), MIG), ("MIG-1",)) == ""


LOST = Gpu(1, error="GPU is lost")
FOUR = Gpu(3, "GPU-w", "RTX", "12.0", 97887, 20004, utilization=100, pci="0000:04:00")


def test_a_gpu_that_failed_during_the_swap_is_named_with_what_helps() -> None:
    off_the_bus = Xid(1000.0, "0000:02:00", 79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    found = gpus.failure([ONE, LOST], plan("GPU-a", "GPU-gone"), [off_the_bus])
    assert found is not None
    assert found.what.startswith(
        "no GPU GPU-gone on this host: it has 2; GPU 1 may be it (GPU is lost): the kernel log has"
    )
    found = gpus.failure([ONE, LOST], plan("1"), [off_the_bus])
    assert found is not None
    assert "Xid 79" in found.what
    assert found.todo.startswith("reboot the host")
    here = [Xid(1000.0, "0000:01:00", 94, "Contained: FBHUB"), Xid(1001.0, "0000:01:00", 43, "")]
    found = gpus.failure([ONE], plan("GPU-a"), here)
    assert found is not None
    assert (found.what, "Xid 94" in found.todo) == ("GPU 0 GPU-a failed", True)


def test_an_error_of_the_servers_own_kernels_or_of_another_gpu_is_no_failure_of_the_gpu() -> None:
    own = Xid(1000.0, "0000:01:00", 31, "MMU Fault: ENGINE GRAPHICS")
    other = Xid(1000.0, "0000:04:00", 79, "")
    assert gpus.failure([ONE, FOUR], plan("GPU-a"), [own, other]) is None
    assert gpus.failure([ONE, LOST], plan("GPU-a"), []) is None
