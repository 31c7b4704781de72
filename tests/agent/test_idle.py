from __future__ import annotations

from dataclasses import replace

import pytest
from samples import plan

from kernelswap.agent import idle
from kernelswap.protocol import Gpu

WEDGED = Gpu(3, "GPU-w", "RTX", "12.0", 97887, 20004, utilization=100, pci="0000:04:00")
LOST = Gpu(1, error="GPU is lost")
SOUND = Gpu(0, "GPU-s", "RTX", "12.0", 97887, 4, pci="0000:01:00")


def test_memory_is_held_above_the_idle_level_and_the_margin() -> None:
    assert idle.is_held(WEDGED, plan(), {})
    assert not idle.is_held(WEDGED, plan(), {"GPU-w": 20000})
    assert not idle.is_held(replace(WEDGED, memory_used=1024), plan(), {})
    assert not idle.is_held(replace(WEDGED, memory_used=None), plan(), {}), "NVML does not know it"
    assert not idle.is_held(replace(SOUND, utilization=100), plan(), {}), "how busy it is decides nothing"


@pytest.mark.parametrize(
    ("gpu", "known", "level"),
    [
        (SOUND, {}, 4),
        (SOUND, {"GPU-s": 500}, 4),
        (replace(SOUND, memory_used=900), {"GPU-s": 500}, 500),  # within the margin, and yet it may be a rest
        (replace(SOUND, memory_used=2500), {}, None),  # nothing is known of it, so it may be a rest
        (replace(SOUND, pids=(7,)), {}, None),
        (replace(SOUND, memory_used=None), {}, None),
        (replace(SOUND, error="no answer"), {}, None),
    ],
)
def test_an_idle_level_is_learned_from_a_gpu_that_nothing_holds(
    gpu: Gpu, known: dict[str, int], level: int | None
) -> None:
    assert idle.learned(known, [gpu]).get("GPU-s") == level
