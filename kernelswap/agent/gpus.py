"""The host's GPUs as NVML reports them, through pynvml. A figure that NVML does not know is None, never a guess."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

from kernelswap.protocol import Gpu

MIB = 1024 * 1024


class GpuError(Exception):
    """NVML is absent or does not answer; the text says why."""


def read() -> Tuple[Gpu, ...]:
    """All GPUs of the host in NVML's order. Raises GpuError."""
    import pynvml  # only where it is needed: out of a zipapp its import costs 0.15 s

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuError(f"NVML does not start: {error}") from None
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise GpuError(f"NVML does not answer: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(nvml, handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    processes = _known(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    utilization = _known(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        memory_total=memory.total // MIB,
        memory_used=memory.used // MIB,
        utilization=utilization.gpu if utilization else None,
        power=_watts(_known(nvml, nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit=_watts(_known(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        sm_clock=_known(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature=_known(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        pids=tuple(sorted(process.pid for process in processes)),
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 counts what the driver keeps for itself apart; version 1, all that older drivers have, as used."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _known(nvml: Any, query: Callable[..., Any], *args: Any) -> Any:
    try:
        return query(*args)
    except nvml.NVMLError:
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
