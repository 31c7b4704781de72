"""The host's GPUs as NVML reports them, through pynvml. A figure that NVML does not know is None, never a guess."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import Any, Callable, List, NoReturn, Optional, Tuple

from kernelswap.protocol import Gpu, decode, encode

MIB = 1024 * 1024


class GpuError(Exception):
    """NVML is absent or does not answer; the text says why."""


def read(deadline: float = 60.0) -> Tuple[Gpu, ...]:
    """All GPUs of the host in NVML's order. Raises GpuError.

    A wedged driver can block a query for ever, so a child asks, and is abandoned after `deadline` seconds.
    """
    # Only where it is needed, since out of a zipapp it costs 0.15 s; and here, so that the child need not do it again.
    importlib.import_module("pynvml")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = _read_until(pipe.fileno(), time.monotonic() + deadline)
    if text is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # one that hangs in the kernel stays; nobody waits for it
        raise GpuError(f"NVML gives no answer within {deadline:g} s")
    os.waitpid(child, 0)
    answer = decode(_Answer, text.decode())
    if answer.error:
        raise GpuError(answer.error)
    return answer.gpus


@dataclass(frozen=True)
class _Answer:
    """What the child says."""

    gpus: Tuple[Gpu, ...] = ()
    error: str = ""


def _answer(pipe: int) -> NoReturn:
    try:
        try:
            answer = _Answer(_query())
        except Exception as error:
            answer = _Answer(error=f"NVML does not answer: {error}")
        with os.fdopen(pipe, "wb") as file:
            file.write(encode(answer).encode())
    finally:
        os._exit(0)


def _read_until(pipe: int, deadline: float) -> Optional[bytes]:
    """All that is written until the other end closes; None if that takes too long."""
    text = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, 65536)
        if not part:
            return text
        text += part


def _query() -> Tuple[Gpu, ...]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(nvml, handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    # Where NVML does not know the processes, the memory speaks for them in the proof of a clean host.
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
