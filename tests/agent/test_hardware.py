from __future__ import annotations

import dataclasses

import pytest
import samples

from kernelswap.agent import hardware
from kernelswap.protocol import Gpu, Plan, Requires

RTX = Gpu(0, "GPU-0", "NVIDIA RTX PRO 6000", "12.0", memory_total=97887, driver="580.95.05")
H200 = Gpu(0, "GPU-0", "NVIDIA H200", "9.0", memory_total=143771, driver="550.54.15")
SPARK = Gpu(0, "GPU-0", "NVIDIA GB10", "12.1", memory_total=None, driver="580.95.05")


def host(*kinds: Gpu) -> list[Gpu]:
    return [dataclasses.replace(gpu, index=index, uuid=f"GPU-{index}") for index, gpu in enumerate(kinds)]


def plan(requires: Requires | None = None, *gpus: str, ranks: int = 1) -> Plan:
    base = dataclasses.replace(samples.plan(*gpus), schedulers=ranks, gpu_count=len(gpus) or ranks)
    return dataclasses.replace(base, requires=requires or Requires())


@pytest.mark.parametrize(
    ("requires", "present", "says"),
    [
        (Requires(), host(RTX), ""),
        (Requires(("sm120",)), host(RTX, RTX), ""),
        (Requires(("sm100", "sm120")), host(RTX), ""),
        (
            Requires(("sm90",)),
            host(RTX),
            "GPU 0 GPU-0 is sm120 (NVIDIA RTX PRO 6000), `requires:` asks for sm90: choose",
        ),
        (Requires(("sm90",)), host(RTX, RTX), "each of GPUs 0, 1 is sm120 (NVIDIA RTX PRO 6000), `requires:` asks"),
        (Requires(("sm100", "sm103")), host(H200), "is sm90 (NVIDIA H200), `requires:` asks for sm100 or sm103"),
        (Requires(("sm120",)), host(SPARK), "is sm121"),
        (Requires(("sm120",)), host(dataclasses.replace(RTX, capability="")), "of unknown architecture"),
        (Requires(("sm120",)), host(RTX, H200), "GPU 1 GPU-1 is sm90"),
        (Requires(memory=97887), host(RTX), ""),
        (Requires(memory=97888), host(RTX), "has 97887 MiB, `requires:` asks for 97888 MiB"),
        (Requires(memory=100000), host(SPARK), "has unknown MiB"),
        (Requires(driver="580.65"), host(RTX), ""),
        (Requires(driver="580.95.05"), host(RTX), ""),
        (Requires(driver="580.100"), host(RTX), "the driver is 580.95.05, `requires:` asks for 580.100: install"),
        (Requires(driver="580"), host(H200), "the driver is 550.54.15"),
        (Requires(driver="580"), host(dataclasses.replace(RTX, driver="")), "NVML does not tell the driver's version"),
        (Requires(("sm120",), 1000, "580"), [], "requires sm120, 1000 MiB, driver 580, and NVML shows no GPU"),
        (Requires(driver="580"), [Gpu(0, error="lost")], "NVML shows no GPU"),
    ],
)
def test_what_a_release_requires(requires: Requires, present: list[Gpu], says: str) -> None:
    faults = hardware.faults(plan(requires), present)
    assert len(faults) == bool(says), faults
    assert says in "".join(map(str, faults))
    assert all(fault.todo for fault in faults)


def test_all_that_is_wrong_is_told_at_once() -> None:
    assert len(hardware.faults(plan(Requires(("sm120",), 200000, "580")), host(H200))) == 3


def test_only_the_instances_own_gpus_count() -> None:
    assert hardware.faults(plan(Requires(("sm90",)), "GPU-1"), host(RTX, H200)) == []
    assert hardware.faults(plan(Requires(("sm120",)), "GPU-1"), host(RTX, H200)) != []


def test_cards_that_are_not_alike_are_told_where_ranks_share_them() -> None:
    (line,) = hardware.notes(plan(None, ranks=2), host(RTX, RTX, H200), 0)
    assert "(each of GPUs 0, 1: NVIDIA RTX PRO 6000, 95 GiB; GPU 2 GPU-2: NVIDIA H200, 140 GiB)" in line
    assert hardware.notes(plan(None, ranks=2), host(RTX, RTX), 0) == []
    assert hardware.notes(plan(None, "GPU-0", "GPU-1", ranks=2), host(RTX, RTX, H200), 0) == []
    assert hardware.notes(plan(None, ranks=1), host(RTX, H200), 0) == []


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (2, True)])
def test_ranks_cannot_share_mig_devices(ranks: int, refused: bool) -> None:
    whole = dataclasses.replace(RTX, mig=True)
    parts = [dataclasses.replace(RTX, uuid=f"MIG-{number}", parent="GPU-0") for number in (1, 2)]
    faults = hardware.faults(plan(None, "MIG-1", "MIG-2", ranks=ranks), [whole, *parts])
    assert [fault.what.startswith("2 ranks cannot share MIG devices") for fault in faults] == [True] * refused


def test_a_server_on_the_cpu_needs_no_gpu() -> None:
    on_cpu = dataclasses.replace(samples.plan(), schedulers=2)
    assert hardware.faults(on_cpu, []) == hardware.notes(on_cpu, host(RTX, H200), 0) == []


@pytest.mark.parametrize(("ranks", "gigabytes", "told"), [(2, 190, False), (2, 220, True), (4, 220, False)])
def test_weights_that_are_larger_than_the_gpus_are_told(ranks: int, gigabytes: int, told: bool) -> None:
    lines = hardware.notes(plan(ranks=ranks), host(RTX, RTX, RTX, RTX), gigabytes * 10**9)
    assert [line.startswith("the weights have 209808 MiB, and 2 GPUs have 195774 MiB") for line in lines] == [
        True
    ] * told


def test_memory_that_nvml_does_not_know_says_nothing() -> None:
    assert hardware.notes(plan(), host(SPARK), 10**15) == []
