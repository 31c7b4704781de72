from __future__ import annotations

from dataclasses import replace

from samples import plan

from kernelswap.agent import clean
from kernelswap.agent.kernel_log import Xid
from kernelswap.protocol import Gpu

WEDGED = Gpu(3, "GPU-w", "RTX", "12.0", 97887, 20004, utilization=100, pci="0000:04:00")
LOST = Gpu(1, error="GPU is lost")
SOUND = Gpu(0, "GPU-s", "RTX", "12.0", 97887, 4, pci="0000:01:00")


def test_what_helps_against_a_wedged_gpu_is_in_the_kernel_log() -> None:
    firmware = Xid(1000.0, "0000:04:00", 119, "Timeout after 45s of waiting for RPC response from GPU0 GSP!")
    other = Xid(1000.0, "0000:09:00", 48, "")
    todo = clean.what_helps([SOUND, WEDGED], plan("GPU-w"), {"GPU-w": 4}, [firmware, other])
    assert todo.startswith("GPU 3: the kernel log has Xid 119 at ")
    assert "reboot the host" in todo
    silent = clean.what_helps([SOUND, WEDGED], plan("GPU-w"), {}, [other])
    assert "nvidia-smi --gpu-reset -i 3" in silent
    assert silent.endswith("if that is its idle level, raise `memory-margin`")
    held = replace(WEDGED, pids=(7,))
    assert clean.what_helps([held], plan("GPU-w"), {}, [firmware]) == "end what is left"
    assert "repair the driver" in clean.what_helps([], plan("GPU-w"), {}, [])
