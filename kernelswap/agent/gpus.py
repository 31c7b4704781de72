"""The host's GPUs as NVML reports them, through pynvml. A figure that NVML does not know is None, never a guess.

A wedged driver can block a query for ever, so a child asks, each GPU in a thread of its own, and says what it learns as
it learns it. What it has not said in time is taken as hanging. The child is left to wait: as long as it does, its GPUs
need not be asked again, neither by us nor by whoever runs after us.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional, Sequence, Tuple

from kernelswap.agent import clock, files, kernel_log, processes, units
from kernelswap.agent.kernel_log import Xid
from kernelswap.protocol import RUN_ROOT, Cause, Gpu, HostFault, Plan, Requires, Timeouts, decode, encode

MIB = 1024 * 1024
SILENT = Path(RUN_ROOT) / "nvml-silent.json"  # the queries that have not come back


class GpuError(Exception):
    """NVML is absent or does not answer; the text says why."""


def read(limit: float = Timeouts.nvml) -> Tuple[Gpu, ...]:
    """All GPUs of the host in NVML's order, each followed by its MIG devices. Raises GpuError.

    limit: seconds. A GPU that is lost, or has not answered by then, hides no other one: it has an `error`.
    """
    silent = still_silent()
    for silence in silent:
        if not silence.gpus:
            raise GpuError(f"NVML gives no answer since {clock.shown(silence.since)}")
    # Only where it is needed, since out of a zipapp it costs 0.15 s; and here, so that the child need not do it again.
    importlib.import_module("pynvml")
    hanging = [gpu for silence in silent for gpu in silence.gpus]
    reader, writer = os.pipe()
    asked = time.time()
    child = os.fork()
    if child == 0:
        _answer(writer, {gpu.index for gpu in hanging})
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text, ended = _read_until(pipe.fileno(), time.monotonic() + limit)
    said = [decode(_Said, line) for line in text.decode("utf-8", "replace").split("\n")[:-1]]
    if ended:
        _reap(child)
        if not said:
            raise GpuError("NVML ends whoever asks it")
    nothing = f"no answer from NVML since {clock.shown(asked)}"
    found = sort(said, hanging, nothing)
    hung = [gpu for gpu in found if gpu.error == nothing]
    if not ended and (hung or not said):
        note_silence(child, asked, silent, hung)
    if not said:
        raise GpuError(f"NVML gives no answer within {limit:g} s")
    return found


@dataclass(frozen=True)
class _Said:
    """One line of the child: how many GPUs there are, what it knows of one, or why NVML does not answer.

    done: nothing more comes of these GPUs.
    """

    count: Optional[int] = None
    gpus: Tuple[Gpu, ...] = ()
    done: bool = False
    error: str = ""


@dataclass(frozen=True)
class _Silence:
    """A query that has not come back: by process id and start time, asked at `since`; no GPUs: NVML as a whole."""

    pid: int
    started: int
    since: float
    gpus: Tuple[Gpu, ...] = ()


def sort(said: Iterable[_Said], hanging: Sequence[Gpu], nothing: str) -> Tuple[Gpu, ...]:
    """The GPUs out of what the child said. Raises GpuError.

    hanging: those it was not asked about; nothing: the error of those that it left out.
    """
    known: Dict[int, Tuple[Gpu, ...]] = {gpu.index: (gpu,) for gpu in hanging}
    for line in said:
        if line.error:
            raise GpuError(line.error)
        for index in range(line.count or 0):
            known.setdefault(index, (Gpu(index, error=nothing),))
        if line.gpus:
            gpus = line.gpus if line.done else tuple(replace(gpu, error=nothing) for gpu in line.gpus)
            known[gpus[0].index] = gpus
    return tuple(gpu for index in sorted(known) for gpu in known[index])


def still_silent() -> List[_Silence]:
    """The queries that still wait. One of a process that was killed has ended too: whoever wants to know asks again."""
    table = None
    found = []
    with contextlib.suppress(OSError, ValueError):
        for item in json.loads(files.read(SILENT) or "[]"):
            silence = decode(_Silence, json.dumps(item))
            table = table or processes.table()
            process = table.get(silence.pid)
            if process and process.started == silence.started and process.state != "Z":
                found.append(silence)
    return found


def note_silence(child: int, since: float, before: Sequence[_Silence], gpus: Sequence[Gpu]) -> None:
    """Let others know of a child that waits for the driver about these GPUs, besides those before it."""
    try:
        started = processes.table()[child].started
        silences = [*before, _Silence(child, started, since, tuple(gpus))]
        files.write(SILENT, "[" + ",".join(map(encode, silences)) + "]")
        # One that hangs in the driver outlives every signal, and no unit ends before all that is in it.
        with contextlib.suppress(OSError, units.UnitError, subprocess.TimeoutExpired):
            units.set_apart(child, f"kernelswap-nvml-{child}.scope")
    except (OSError, KeyError):  # nobody would know of it
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def let_go(pipe: int) -> None:
    """In a child that may outlive us by hours: it keeps nothing of ours, no lock, no output that others wait for."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number not in (pipe, null):
            with contextlib.suppress(OSError):
                os.dup2(null, number) if number < 3 else os.close(number)


def _answer(pipe: int, without: Iterable[int]) -> NoReturn:
    """The child."""
    try:
        let_go(pipe)
        lock = threading.Lock()

        def tell(line: _Said) -> None:
            data = encode(line).encode() + b"\n"
            with lock:
                while data:
                    data = data[os.write(pipe, data) :]

        try:
            _query(tell, set(without))
        except Exception as error:
            tell(_Said(error=f"NVML does not answer: {error}"))
    finally:
        os._exit(0)


def _read_until(pipe: int, deadline: float) -> Tuple[bytes, bool]:
    """All that is written until the other end closes, and whether it has by the deadline."""
    text = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return text, False
        part = os.read(pipe, 65536)
        if not part:
            return text, True
        text += part


def _reap(child: int, patience: float = 5.0) -> None:
    """Take note of the child's end. It has said all, but its end closes the driver's files, which can hang as well."""
    until = time.monotonic() + patience
    while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.005)


def _query(tell: Callable[[_Said], None], without: Iterable[int]) -> None:
    import pynvml

    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    tell(_Said(count=count))
    driver = _text(known(pynvml, pynvml.nvmlSystemGetDriverVersion) or "")
    asked = [Gpu(index, driver=driver) for index in range(count) if index not in without]
    threads = [threading.Thread(target=_ask, args=(pynvml, gpu, tell)) for gpu in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(nvml: Any, gpu: Gpu, tell: Callable[[_Said], None]) -> None:
    """Say who a GPU is, then all of it: should it hang at a figure, it is known which one does."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        pci = known(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        gpu = replace(gpu, uuid=_text(nvml.nvmlDeviceGetUUID(handle)), pci=_pci(pci))
        tell(_Said(gpus=(gpu,)))
        gpu = _figures(nvml, handle, gpu)
        gpus = (gpu, *_mig_devices(nvml, handle, gpu)) if gpu.mig else (gpu,)
        tell(_Said(gpus=gpus, done=True))
    except Exception as error:
        tell(_Said(gpus=(replace(gpu, error=str(error)),), done=True))


def _figures(nvml: Any, handle: Any, gpu: Gpu) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    utilization = known(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mode = known(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return replace(
        _memory(nvml, handle, gpu),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=f"{major}.{minor}",
        utilization=utilization.gpu if utilization else None,
        power=_watts(known(nvml, nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit=_watts(known(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        sm_clock=known(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature=known(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        mig=bool(mode and mode[0] == nvml.NVML_DEVICE_MIG_ENABLE),
    )


def _mig_devices(nvml: Any, handle: Any, gpu: Gpu) -> List[Gpu]:
    """What a divided GPU offers: each device has its own memory and processes, and nothing else of its own."""
    found = []
    for number in range(known(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = known(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if device:  # the numbers have gaps
            part = Gpu(gpu.index, capability=gpu.capability, driver=gpu.driver, pci=gpu.pci, parent=gpu.uuid)
            name = known(nvml, nvml.nvmlDeviceGetName, device) or f"{gpu.name} MIG"
            part = replace(part, uuid=_text(nvml.nvmlDeviceGetUUID(device)), name=_text(name))
            found.append(_memory(nvml, device, part))
    return found


def _memory(nvml: Any, handle: Any, gpu: Gpu) -> Gpu:
    """Version 2 counts what the driver keeps for itself apart; version 1, all that older drivers have, as used.

    Where NVML does not know the processes, the memory speaks for them in the proof of a clean host.
    """
    memory = known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    memory = memory or known(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    running = known(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    return replace(
        gpu,
        memory_total=memory.total // MIB if memory else None,
        memory_used=memory.used // MIB if memory else None,
        pids=tuple(sorted(process.pid for process in running)),
    )


def known(nvml: Any, query: Callable[..., Any], *args: Any) -> Any:
    """What NVML knows; None where it says that it does not. A GPU that is lost knows nothing, and that is no answer."""
    try:
        return query(*args)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def _watts(milliwatts: Optional[int]) -> Optional[float]:
    return None if milliwatts is None else milliwatts / 1000


def _pci(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}" if info else ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# What an instance may use of them.


def assigned(gpus: Iterable[Gpu], names: Sequence[str]) -> List[Gpu]:
    """The GPUs and MIG devices that an instance may use: all when it names none, else those named."""
    return [gpu for gpu in gpus if not gpu.mig and (not names or is_named(gpu, names))]


def is_named(gpu: Gpu, names: Sequence[str]) -> bool:
    """Whether a GPU is named by its UUID or index; a MIG device has no index."""
    return gpu.uuid in names or (not gpu.parent and str(gpu.index) in names)


def needs(plan: Plan) -> bool:
    """Whether an instance cannot go without its GPUs' figures."""
    return bool(plan.gpus or plan.gpu_count)


def of_host(plan: Plan) -> Tuple[Gpu, ...]:
    """The host's GPUs; those that cannot be read are left out where the plan declares none. Raises GpuError."""
    try:
        found = read(plan.timeouts.nvml)
    except GpuError:
        if needs(plan) or plan.requires != Requires():
            raise
        return ()
    return found if needs(plan) else tuple(gpu for gpu in found if not gpu.error)


def failure(present: Sequence[Gpu], plan: Plan, errors: Sequence[Xid]) -> Optional[HostFault]:
    """What failed of the instance's GPUs while it was swapped; None if nothing did."""
    wrong = faults(present, plan.gpus, errors) if needs(plan) else []
    if wrong:
        return wrong[0]
    for gpu in assigned(present, plan.gpus):
        grave = [xid for xid in kernel_log.of(gpu, present, errors) if kernel_log.blames_host(xid)]
        if said := kernel_log.gravest(gpu, grave):
            return HostFault(f"{label(gpu)} failed", str(said))
    return None


def blamed(cause: Cause, plan: Plan, since: float) -> Cause:
    """A GPU that failed since then (epoch seconds) is the cause, whatever the server said of it, and is no release's
    fault."""
    try:
        errors = kernel_log.xids(since)
        found = failure(of_host(plan), plan, errors)
    except GpuError as error:  # it did answer in the preflight
        found = HostFault(str(error), "repair the driver, or reboot the host")
    except OSError:
        return cause
    if found is None:
        return cause
    what = cause.what if found.what in cause.what else f"{found.what}; {cause.what}"
    return replace(cause, what=what, todo=found.todo, signature="gpu", blame="host")


def xids_of(plan: Plan, errors: Sequence[Xid]) -> List[Tuple[Gpu, Xid]]:
    """The errors of the instance's GPUs, each with its GPU; NVML is not asked if there are none."""
    if not errors:
        return []
    present = of_host(plan)
    return [(gpu, xid) for gpu in assigned(present, plan.gpus) for xid in kernel_log.of(gpu, present, errors)]


def faults(gpus: Sequence[Gpu], names: Sequence[str], errors: Sequence[Xid] = ()) -> List[HostFault]:
    """Why an instance cannot have the GPUs that it names, or all if it names none.

    errors: of the kernel log.
    """
    return [_absent(gpus, name, errors) for name in names if not any(is_named(gpu, [name]) for gpu in gpus)] + [
        _divided(gpus, gpu) if gpu.mig else _unreadable(gpus, gpu, errors)
        for gpu in gpus
        if (is_named(gpu, names) and (gpu.mig or gpu.error)) or (not names and gpu.error)
    ]


REPAIR = "reset it, or reboot the host; or give the instance other GPUs by `gpus:`"


def _unreadable(gpus: Sequence[Gpu], gpu: Gpu, errors: Sequence[Xid]) -> HostFault:
    said = kernel_log.gravest(gpu, kernel_log.of(gpu, gpus, errors))
    return _with(f"{label(gpu)}: {gpu.error}", said, REPAIR)


def _with(what: str, said: Optional[HostFault], otherwise: str) -> HostFault:
    """A fault with what the kernel log says of it, if that is known."""
    return HostFault(f"{what}: {said.what}", said.todo) if said else HostFault(what, otherwise)


def _absent(gpus: Sequence[Gpu], name: str, errors: Sequence[Xid]) -> HostFault:
    count = sum(not gpu.parent for gpu in gpus)
    unknown = [gpu for gpu in gpus if not gpu.uuid and not name.isdigit()]
    may_be = "".join(f"; GPU {gpu.index} may be it ({gpu.error})" for gpu in unknown)
    said = [kernel_log.gravest(gpu, kernel_log.of(gpu, gpus, errors)) for gpu in unknown]
    what = f"no GPU {name} on this host: it has {count}{may_be}"
    return _with(what, next(filter(None, said), None), "correct `gpus:`, or reboot the host if one is missing")


def _divided(gpus: Sequence[Gpu], gpu: Gpu) -> HostFault:
    parts = ", ".join(part.uuid for part in gpus if part.parent == gpu.uuid)
    todo = f"choose among {parts}" if parts else "create some by `nvidia-smi mig`, or turn MIG off"
    return HostFault(f"{label(gpu)} is divided into MIG devices and offers only these", todo)


def numbering(gpus: Sequence[Gpu], names: Sequence[str]) -> str:
    """CUDA_VISIBLE_DEVICES by index for GPUs that are pinned by UUID; "" where only UUIDs are right.

    SGLang 0.5.23 reads the variable as whole numbers (custom_all_reduce_utils.py), and by UUIDs loses its own
    all-reduce. CUDA counts by PCI address, as CUDA_DEVICE_ORDER tells it to, but leaves out what it cannot use.
    """
    if any(gpu.error or gpu.mig for gpu in gpus):
        return ""
    index = {gpu.uuid: str(number) for number, gpu in enumerate(sorted(gpus, key=lambda gpu: gpu.pci))}
    return ",".join(index[name] for name in names) if set(names) <= set(index) else ""


def label(gpu: Gpu) -> str:
    kind = "MIG device of GPU" if gpu.parent else "GPU"
    return f"{kind} {gpu.index} {gpu.uuid}".rstrip()
