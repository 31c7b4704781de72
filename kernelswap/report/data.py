"""One swap as frozen values, from the evidence that its host has kept. Whatever was not measured is None or empty."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import TypeVar

from kernelswap.agent import knowledge
from kernelswap.agent.verify import gates
from kernelswap.diagnosis import Finding, diagnose
from kernelswap.differences import Change, compare, of_plan
from kernelswap.host_names import natural
from kernelswap.measured import (
    BASELINE,
    BENCH_FILE,
    DRIFT_FILE,
    GPU_FILE,
    METRICS_FILE,
    THROUGHPUT_FILE,
    DriftVerdict,
    Point,
    ThroughputVerdict,
)
from kernelswap.protocol import Event, Evidence, Plan, Report, Resolved, decode
from kernelswap.traces import Sample, ServerSample, Trace, read_bench, read_gpus, read_server

IDLE = 0x1  # NVML's bit of a GPU that has nothing to do: no reason that matters
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The median of repeated runs and what they spread over. runs: how many."""

    median: float
    low: float
    high: float
    runs: int = 1


@dataclass(frozen=True)
class Metric:
    """A figure of the benchmark. rising: whether more is better."""

    name: str
    unit: str
    rising: bool = False


OUTPUT = Metric("Output", "tok/s", rising=True)
INPUT = Metric("Input", "tok/s", rising=True)
PERCENTILES = ("median", "p90", "p99")
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "End to end"}  # Run's field -> what people call it


@dataclass(frozen=True)
class Compared:
    """One figure of the candidate at one concurrency, against the known-good's.

    difference: by which its runs are above (+) or below (-), where a gate goes by it, see agent/verify/gates.py.
    change: the same, or else of the medians. judged: `better`, `worse`, `same` (their spreads overlap), or "" where it
    cannot be told.
    """

    concurrency: int
    metric: Metric
    before: Range | None
    after: Range | None
    difference: float | None = None

    @property
    def change(self) -> float | None:
        if self.difference is not None:
            return self.difference
        if self.before is None or self.after is None or not self.before.median:
            return None
        return self.after.median / self.before.median - 1

    @property
    def judged(self) -> str:
        if self.before is None or self.after is None or min(self.before.runs, self.after.runs) < 2:
            return ""
        if self.after.low <= self.before.high and self.before.low <= self.after.high:
            return "same"
        return "better" if (self.after.median > self.before.median) == self.metric.rising else "worse"


@dataclass(frozen=True)
class Step:
    """One step of the transaction. start: seconds after the swap's. back: of the way back."""

    name: str
    start: float
    seconds: float
    ok: bool
    back: bool
    detail: str


@dataclass(frozen=True)
class Phase:
    """What the verification did from `start` to `end` (epoch seconds)."""

    name: str
    start: float
    end: float

    @property
    def loaded(self) -> bool:
        return self.name.startswith("run")


@dataclass(frozen=True)
class GpuSummary:
    """A GPU while the benchmark ran. Means; memory and temperature at their highest."""

    gpu: str
    utilization: float | None
    power: float | None
    power_limit: float | None
    sm_clock: float | None
    sm_clock_max: float | None
    memory_used: float | None
    memory_total: float | None
    temperature: float | None
    throttle: tuple[str, ...] | None


@dataclass(frozen=True)
class Story:
    """All that is known of a swap. log: the end of the failed server's; unread: evidence that could not be read."""

    host: str
    report: Report
    steps: tuple[Step, ...] = ()
    throughput: ThroughputVerdict | None = None
    compared: tuple[Compared, ...] = ()
    drift: DriftVerdict | None = None
    changes: tuple[Change, ...] = ()
    samples: tuple[Sample, ...] = ()
    server: tuple[ServerSample, ...] = ()
    findings: tuple[Finding, ...] = ()
    phases: tuple[Phase, ...] = ()
    gpus: tuple[GpuSummary, ...] = ()
    notes: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def story(host: str, evidence: Evidence) -> Story:
    """Raises ValueError where the evidence is of no single swap."""
    report = evidence.report
    if report is None:
        raise ValueError(f"{host}: there is no such swap")
    unread: list[str] = []
    throughput = _value(ThroughputVerdict, evidence, THROUGHPUT_FILE, unread)
    trace = _read(read_gpus, evidence, GPU_FILE, unread)
    samples = trace.samples
    candidate = tuple(sample for sample in samples if not sample.phase.startswith(BASELINE))
    server = _read(read_server, evidence, METRICS_FILE, unread).server
    runs = _read(read_bench, evidence, BENCH_FILE, unread).runs
    events = tuple(_events(evidence.files.get("events.jsonl", "")))
    phases = tuple(_phases(samples))
    return Story(
        host=host,
        report=report,
        steps=tuple(_steps(report, events)),
        throughput=throughput,
        compared=tuple(_compared(throughput)) if throughput else (),
        drift=_value(DriftVerdict, evidence, DRIFT_FILE, unread),
        changes=changes(report, evidence.plans, evidence.resolved),
        samples=samples,
        server=server,
        findings=_first_of_each(diagnose(candidate, runs, server)) if candidate else (),
        phases=phases,
        gpus=tuple(_summaries(samples, phases)),
        notes=_notes(report, events),
        log=tuple(evidence.files.get("server.log", "").splitlines()),
        unread=tuple(unread),
    )


def _value(kind: type[T], evidence: Evidence, name: str, unread: list[str]) -> T | None:
    if name not in evidence.files:
        return None
    try:
        return decode(kind, evidence.files[name])
    except (ValueError, KeyError) as error:
        unread.append(f"{name}: {error}")
        return None


def _read(read: Callable[[str], Trace], evidence: Evidence, name: str, unread: list[str]) -> Trace:
    try:
        return read(evidence.files[name]) if name in evidence.files else Trace()
    except ValueError as error:
        unread.append(f"{name}: {error}")
        return Trace()


def _first_of_each(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """A finding of several phases once: where it weighs most."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.name, finding)
    return tuple(kept.values())


def _events(text: str) -> Iterator[Event]:
    for line in text.splitlines():
        try:
            yield decode(Event, line)
        except ValueError:
            continue  # torn by a power cut


def _notes(report: Report, events: Iterable[Event]) -> tuple[str, ...]:
    said = (f"{event.step}: {event.text}" for event in events if event.kind == "note")
    return tuple(dict.fromkeys([*report.notes, *said]))


def _steps(report: Report, events: Sequence[Event]) -> Iterator[Step]:
    begins = {event.step: event.at - report.started for event in reversed(events) if event.kind == "begin"}
    end = 0.0
    for step in report.steps:
        back = step.name.startswith("< ")
        start = max(0.0, begins.get(step.name, end))
        end = start + step.seconds
        yield Step(step.name.removeprefix("< "), start, step.seconds, step.ok, back, step.detail)


def unreachable(steps: Sequence[Step]) -> float | None:
    """Seconds from the first server's stop to a server that is open again; None where nothing was stopped or opened."""
    stop = next((step.start for step in steps if step.name == "stop"), None)
    opened = [step.start + step.seconds for step in steps if step.name == "open" and step.ok]
    return None if stop is None or not opened else opened[-1] - stop


# Throughput and latency.


def _compared(verdict: ThroughputVerdict) -> Iterator[Compared]:
    before = {point.concurrency: point for point in verdict.baseline.points} if verdict.baseline else {}
    after = {point.concurrency: point for point in verdict.candidate.points}
    for concurrency in sorted(before.keys() | after.keys()):
        pair = before.get(concurrency), after.get(concurrency)
        was, now = ({OUTPUT: _output(point), **_of_runs(point)} if point else {} for point in pair)
        for metric in [*now, *(metric for metric in was if metric not in now)]:
            difference = _difference(*pair) if metric == OUTPUT else None
            yield Compared(concurrency, metric, was.get(metric), now.get(metric), difference)


def _difference(before: Point | None, after: Point | None) -> float | None:
    return gates.difference(after, before) if before and after and before.runs and after.runs else None


def _output(point: Point) -> Range:
    return Range(point.median, point.low, point.high, len(point.runs))


def _of_runs(point: Point) -> dict[Metric, Range]:
    found = {INPUT: [run.input_tok_s for run in point.runs]}
    for field, name in LATENCIES.items():
        for percentile in PERCENTILES:
            values: list[float | None] = [getattr(run, field).get(percentile) for run in point.runs]
            found[Metric(f"{name} {percentile}", "ms")] = [value for value in values if value is not None]
    return {metric: spread for metric, values in found.items() if (spread := _range(values))}


def _range(values: Iterable[float]) -> Range | None:
    known = [value for value in values if math.isfinite(value)]
    return Range(median(known), min(known), max(known), len(known)) if known else None


# What differs.


def changes(report: Report, plans: Sequence[Plan], resolved: Sequence[Resolved]) -> tuple[Change, ...]:
    """What differs between the server before and after; nothing where a side is not known."""
    made = {item.release: item for item in resolved}
    sides = {plan.release: of_plan(plan, made.get(plan.release)) for plan in plans}
    before, after = sides.get(report.previous or ""), sides.get(report.request.release)
    return compare(before, after) if before and after else ()


# GPUs.


def _phases(samples: Sequence[Sample]) -> Iterator[Phase]:
    """Each ends where the next begins."""
    runs = [(name, next(part).time) for name, part in groupby(samples, key=lambda sample: sample.phase)]
    ends = [*(start for _, start in runs[1:]), *(sample.time for sample in samples[-1:])]
    for (name, start), end in zip(runs, ends, strict=True):
        yield Phase(name, start, end)


def _summaries(samples: Sequence[Sample], phases: Sequence[Phase]) -> Iterator[GpuSummary]:
    """While the benchmark ran; over all the time where no phase says so."""
    loaded = {phase.name for phase in phases if phase.loaded}
    counted = [sample for sample in samples if not loaded or sample.phase in loaded]
    for gpu in sorted({sample.gpu for sample in samples}, key=natural):
        mine = [sample for sample in counted if sample.gpu == gpu]
        yield GpuSummary(
            gpu,
            utilization=_mean(mine, "utilization"),
            power=_mean(mine, "power"),
            power_limit=_mean(mine, "power_limit"),
            sm_clock=_mean(mine, "sm_clock"),
            sm_clock_max=_mean(mine, "sm_clock_max"),
            memory_used=_highest(mine, "memory_used"),
            memory_total=_highest(mine, "memory_total"),
            temperature=_highest(mine, "temperature"),
            throttle=_reasons(mine),
        )


def _reasons(samples: Iterable[Sample]) -> tuple[str, ...] | None:
    """Why clocks were held down at times, in NVML's words; None where it was not asked."""
    known = [sample.reasons for sample in samples if sample.reasons is not None]
    names: dict[str, int] = json.loads(knowledge.read("diagnosis.json"))["reasons"]["names"]
    seen = (name for name, bit in names.items() if bit != IDLE and any(bits & bit for bits in known))
    return tuple(seen) if known else None


def _known(samples: Iterable[Sample], name: str) -> list[float]:
    return [value for sample in samples if (value := getattr(sample, name)) is not None]


def _mean(samples: Iterable[Sample], name: str) -> float | None:
    known = _known(samples, name)
    return fmean(known) if known else None


def _highest(samples: Iterable[Sample], name: str) -> float | None:
    return max(_known(samples, name), default=None)
