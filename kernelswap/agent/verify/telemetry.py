"""What GPUs and server did while it was verified, sampled in the background: gpu.csv and metrics.csv of the evidence.

Nothing here can fail, hang or slow a swap. A child asks NVML, each GPU in a thread of its own, since a wedged driver
can block a query for ever; it writes into a pipe, and a thread of ours adds the phase and writes the files. A child
that does not end is left alone, as in gpus.py. Columns: measured.GPU_COLUMNS and SERVER_COLUMNS; an empty cell is not
known.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
import signal
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Sequence, TextIO, Type

from kernelswap.agent import client, gpus
from kernelswap.agent.client import Client, Unanswered
from kernelswap.measured import GPU_COLUMNS, GPU_FILE, METRICS_FILE, SERVER_COLUMNS
from kernelswap.protocol import Gpu, Plan

INTERVAL = 0.5  # seconds between two samples of a GPU
ROUNDS = 1200  # after so many the interval doubles, so that a file stays below some MB whatever the run takes
SILENT = 10.0  # seconds without a sample after which a GPU that keeps the child from ending is taken as hanging
GONE = "-"  # the child's line for a GPU that can be read no more


def sampling(plan: Plan, evidence: Path) -> Telemetry:
    """Sample the instance's GPUs and its server until the `with` block ends; `phase` marks what happens. What cannot be
    sampled is told in `notes`."""
    notes: List[str] = []
    present: Sequence[Gpu] = ()
    try:
        present = gpus.of_host(plan)
    except gpus.GpuError as error:
        notes.append(f"GPUs are not sampled: {error}")
    mine = gpus.assigned(present, plan.gpus)
    notes += [f"{gpus.label(gpu)} is not sampled: {gpu.error}" for gpu in mine if gpu.error]
    sound = [gpu for gpu in mine if not gpu.error]
    return Telemetry(sound, Client(client.base_url(plan), plan.served_name), evidence, notes)


class Telemetry:
    """Samples while it is entered. notes: what could not be sampled, and why, a line each."""

    def __init__(self, present: Sequence[Gpu], server: Client, evidence: Path, notes: Sequence[str] = ()) -> None:
        self.notes = list(notes)
        self._present, self._server, self._evidence = tuple(present), server, evidence
        self._phase = ""
        self._over = threading.Event()
        self._threads: List[threading.Thread] = []
        self._child = 0
        self._pipe = -1
        self._began = 0.0
        self._heard: Dict[str, float] = {}  # UUID -> when its last sample came

    def phase(self, name: str) -> None:
        """What is sampled from now on belongs to this, such as `warm-up` or `run c=64 1/3`."""
        self._phase = name

    def __enter__(self) -> Telemetry:
        try:
            if self._present:
                self._ask_gpus()
            self._start(self._ask_server)
        except (OSError, RuntimeError, ImportError) as error:
            self.notes.append(f"GPUs are not sampled: {error}")
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._over.set()
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            if not _ended(self._child, patience=2.0):
                self._leave()
                return
        for thread in self._threads:
            thread.join(3.0)

    def _leave(self) -> None:
        """The child hangs in the driver, for those GPUs of which nothing was heard any more."""
        silent = [gpu for gpu in self._present if time.monotonic() - self._heard.get(gpu.uuid, 0.0) > SILENT]
        if silent:
            gpus.note_silence(self._child, self._began, gpus.still_silent(), silent)
        self.notes.append(f"NVML does not answer: {', '.join(map(gpus.label, silent)) or 'the sampler was left alone'}")

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._quietly, args=(work,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _quietly(self, work: Callable[[], None]) -> None:
        """A full or read-only disk ends the samples, nothing else."""
        try:
            work()
        except (OSError, ValueError) as error:
            self.notes.append(f"samples end early: {error}")

    def _ask_gpus(self) -> None:
        importlib.import_module("pynvml")  # here, so that the child need not
        reader, writer = os.pipe()
        self._began = time.time()
        child = os.fork()
        if child == 0:
            _answer(writer, self._present)
        os.close(writer)
        self._child, self._pipe = child, reader
        self._start(self._write_gpus)

    def _write_gpus(self) -> None:
        with (
            os.fdopen(self._pipe, encoding="utf-8") as pipe,
            _table(self._evidence / GPU_FILE, tuple(GPU_COLUMNS.values())) as add,
        ):
            for line in pipe:
                at, _, rest = line.rstrip("\n").partition(",")
                if rest.startswith(GONE):
                    self.notes.append(rest[len(GONE) :])
                elif not self._over.is_set():
                    cells = next(csv.reader([rest]))
                    self._heard[cells[1]] = time.monotonic()
                    add([at, self._phase, *cells])

    def _ask_server(self) -> None:
        """Once a second at most; a server without --enable-metrics is not asked again."""
        path = self._evidence / METRICS_FILE
        add: Optional[Callable[[Sequence[Any]], None]] = None
        with contextlib.ExitStack() as stack:
            for _ in _rounds(2 * INTERVAL, self._over.wait):
                try:
                    seen = self._server.gauges(timeout=2)
                except Unanswered as error:
                    if "HTTP 404" in str(error):
                        self.notes.append("SGLang's counters are not sampled: the server has no --enable-metrics")
                        return
                    continue
                add = add or stack.enter_context(_table(path, SERVER_COLUMNS))
                add([f"{time.time():.3f}", self._phase, *(_cell(seen.get(name)) for name in SERVER_COLUMNS[2:])])


@contextlib.contextmanager
def _table(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Sequence[Any]], None]]:
    """A CSV file that is added to line by line; its header is written only once."""
    file: TextIO
    with path.open("a", encoding="utf-8", newline="", buffering=1) as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(columns)
        yield writer.writerow


def _rounds(interval: float, wait: Callable[[float], Any]) -> Iterator[int]:
    """Count rounds, each an interval after the last, for as long as `wait` is not told to end."""
    due = time.monotonic()
    number = 0
    while True:
        yield number
        number += 1
        due = max(due + interval * 2 ** (number // ROUNDS), time.monotonic())
        if wait(max(0.0, due - time.monotonic())):
            return


def _cell(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.6g}"


def _ended(child: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


# The child.


def _answer(pipe: int, present: Sequence[Gpu]) -> NoReturn:
    """Sample until nobody reads any more."""
    try:
        gpus.let_go(pipe)
        import pynvml

        pynvml.nvmlInit()
        threads = [threading.Thread(target=_sample, args=(pynvml, gpu, pipe), daemon=True) for gpu in present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except Exception as error:
        _tell(pipe, f"{time.time():.3f},{GONE}GPUs are not sampled: {error}")
    finally:
        os._exit(0)


def _tell(pipe: int, line: str) -> None:
    """In one write: shorter than PIPE_BUF, it is not mixed with another thread's. Ends the child with its reader."""
    try:
        os.write(pipe, line.replace("\n", " ").encode()[:4000] + b"\n")
    except OSError:
        os._exit(0)


def _sample(nvml: Any, gpu: Gpu, pipe: int) -> None:
    try:
        # By index, since looking for a UUID asks every GPU; one that hangs would silence the others.
        by_uuid = nvml.nvmlDeviceGetHandleByUUID
        handle = by_uuid(gpu.uuid) if gpu.parent else nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        who = [str(gpu.index), gpu.uuid, gpu.name.replace(",", " ")]
        fixed = _fixed(nvml, handle)
        for _ in _rounds(INTERVAL, time.sleep):
            seen = {**fixed, **_figures(nvml, handle)}
            cells = [seen.get(name) for name in list(GPU_COLUMNS)[5:]]
            _tell(pipe, ",".join([f"{time.time():.3f}", *who, *(cell or "" for cell in cells)]))
    except Exception as error:
        _tell(pipe, f"{time.time():.3f},{GONE}{gpus.label(gpu)} is not sampled any more: {error}")


def _fixed(nvml: Any, handle: Any) -> Dict[str, str]:
    known = {
        "sm_clock_max": gpus.known(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        "memory_clock_max": gpus.known(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _figures(nvml: Any, handle: Any) -> Dict[str, str]:
    """The figures of one moment, as nvidia-smi writes them; those that NVML does not know are left out."""

    def ask(query: Callable[..., Any], *args: Any) -> Any:
        return gpus.known(nvml, query, handle, *args)

    rates = ask(nvml.nvmlDeviceGetUtilizationRates)
    power, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)  # the name that older drivers have as well
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2) or ask(nvml.nvmlDeviceGetMemoryInfo)
    # Each takes the driver some 20 ms, in which it counts.
    received = ask(nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES)
    sent = ask(nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_TX_BYTES)
    seen = {
        "utilization": rates and rates.gpu,
        "memory_utilization": rates and rates.memory,
        "power": None if power is None else round(power / 1000, 1),
        "power_limit": None if limit is None else round(limit / 1000, 1),
        "sm_clock": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "memory_clock": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        "reasons": None if reasons is None else f"0x{reasons:016x}",
        "memory_used": memory and memory.used // gpus.MIB,
        "memory_total": memory and memory.total // gpus.MIB,
        "pcie_rx": None if received is None else round(received / 1000, 1),  # KB/s
        "pcie_tx": None if sent is None else round(sent / 1000, 1),
        "pcie_gen": ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        "pcie_width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        "temperature": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    }
    return {name: str(value) for name, value in seen.items() if value is not None}
