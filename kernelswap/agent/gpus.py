"""The host's GPUs as NVML reports them, through pynvml. A figure that NVML does not know is None, never a guess."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import pynvml

from kernelswap.protocol import Gpu

MIB = 1024 * 1024


class GpuError(Exception):
    """NVML is absent or does not answer; the text says why."""


def read() -> Tuple[Gpu, ...]:
    """All GPUs of the host in NVML's order. Raises GpuError."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuError(f"NVML does not start: {error}") from None
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise GpuError(f"NVML does not answer: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    processes = _known(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    utilization = _known(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        memory_total=memory.total // MIB,
        memory_used=memory.used // MIB,
        utilization=utilization.gpu if utilization else None,
        power=_watts(_known(pynvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit=_watts(_known(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        sm_clock=_known(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        temperature=_known(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        pids=tuple(sorted(process.pid for process in processes)),
    )


def _memory(handle: Any) -> Any:
    """Version 2 counts what the driver keeps for itself apart; version 1, all that older drivers have, as used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _known(query: Callable[..., Any], *args: Any) -> Any:
    try:
        return query(*args)
    except pynvml.NVMLError:
        return None


def _watts(milliwatts: Optional[int]) -> Optional[float]:
    return None if milliwatts is None else milliwatts / 1000


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def assigned(gpus: Tuple[Gpu, ...], names: Tuple[str, ...]) -> List[Gpu]:
    """The GPUs that an instance may use: all when it names none, else those named by index or UUID."""
    if not names:
        return list(gpus)
    return [gpu for gpu in gpus if str(gpu.index) in names or gpu.uuid in names]


def missing(gpus: Tuple[Gpu, ...], names: Tuple[str, ...]) -> List[str]:
    """The names among an instance's GPUs that this host does not have."""
    return [name for name in names if not assigned(gpus, (name,))]
