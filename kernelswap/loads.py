"""What the GPUs did and what came of it, phase by phase under load: medians of samples, without ramp, tail and pauses.

What is not known is None, never 0. Thresholds, cards and PCIe rates are data: knowledge/diagnosis.json.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from kernelswap.agent import knowledge
from kernelswap.measured import BASELINE
from kernelswap.traces import Bench, Sample, ServerSample, by_gpu, patience

# NVML's bits of why the clocks are not higher.
NO_POWER, HEAT, SLOWDOWN = 0x4 | 0x80 | 0x200, 0x20 | 0x40, 0x8
HARDWARE = ("power", "power_limit", "sm_clock", "sm_clock_max")


@dataclass(frozen=True)
class Card:
    """One GPU under load: medians; None where nothing is known. heat, held: shares of the samples whose clocks heat or
    power held down; gaps: of those without work; used: of its memory."""

    gpu: str
    count: int
    name: str
    mean: float | None
    gaps: float
    at: dict[str, float | None]
    heat: float | None
    held: float | None
    other: float | None

    @property
    def sku(self) -> dict[str, Any]:
        return known_card(self.name)

    @property
    def power(self) -> float | None:
        """Share of the power limit; the card's own limit where the enforced one is not known."""
        return ratio(self.at["power"], self.at["power_limit"] or self.sku.get("power_limit"))

    @property
    def clock(self) -> float | None:
        """Share of the maximum, or of the card's boost clock where NVML tells a maximum that no work reaches."""
        top = self.at["sm_clock_max"]
        return ratio(self.at["sm_clock"], min(top, self.sku.get("boost", top)) if top else None)

    @property
    def memory_clock(self) -> float | None:
        return ratio(self.at["memory_clock"], self.at["memory_clock_max"])

    @property
    def used(self) -> float | None:
        share = ratio(self.at["memory_used"], self.at["memory_total"] or self.sku.get("memory"))
        return share if share is None or share <= 1.05 else None  # a file of mixed units

    @property
    def transfer(self) -> float | None:
        """MB/s over PCIe in the fuller direction."""
        return max((rate for rate in (self.at["pcie_rx"], self.at["pcie_tx"]) if rate is not None), default=None)

    @property
    def link(self) -> float | None:
        """MB/s that its PCIe link carries in one direction."""
        lane = table()["pcie"]["lane"].get(f"{self.at['pcie_gen'] or 0:.0f}")
        return lane * self.at["pcie_width"] if lane and self.at["pcie_width"] else None

    @property
    def heated(self) -> bool:
        """Heat holds its clocks down: so NVML says, or it is hot and slow and NVML says no other reason."""
        enough = threshold("heated") if (self.held or 0) < threshold("capped") else threshold("capped")
        if self.heat is not None and self.heat >= enough:
            return True
        hot = (self.at["temperature"] or 0) >= threshold("hot")
        slow = self.clock is not None and self.clock < threshold("clocks") and not self.limited
        return hot and slow and (self.other is None or self.other < threshold("capped"))

    @property
    def limited(self) -> bool:
        """Power holds it: so NVML says, or it draws all that it may and NVML says nothing, or the clocks are down."""
        if self.held is not None and self.held >= threshold("capped"):
            return True
        free = self.held is not None and self.clock is not None and self.clock >= threshold("clocks")
        return self.power is not None and self.power >= threshold("at_limit") and not free


@dataclass(frozen=True)
class Load:
    """One phase under load: its samples without ramp, tail and pauses, what each GPU did, and what came of it.

    tokens: output tokens per second, 0 if none came; None if it is not known. counted_only: they are the server's word,
    which stands still when the server does. kind: prefill, decode, or "". before: the tokens of the known-good at the
    same concurrency, where it was measured too.
    """

    phase: str
    samples: tuple[Sample, ...]
    cards: tuple[Card, ...]
    runs: tuple[Bench, ...]
    server: tuple[ServerSample, ...]
    seconds: float
    concurrency: float | None
    tokens: float | None
    counted_only: bool
    kind: str
    before: float | None = None

    def over(self, what: Callable[[Card], float | None]) -> float | None:
        """The median over the GPUs of what is known of them."""
        return median(what(card) for card in self.cards)

    def at(self, field: str) -> float | None:
        return self.over(lambda card: card.at[field])

    def share(self, holds: Callable[[Card], bool]) -> float:
        return sum(map(holds, self.cards)) / len(self.cards)

    def counted(self, field: str) -> float | None:
        """The median of one of the server's counters."""
        return median(getattr(sample, field) for sample in self.server)

    @property
    def busy(self) -> bool:
        """Busy throughout; False where utilisation is not known."""
        return self.works and (self.at("utilization") or 0) >= threshold("busy")

    @property
    def works(self) -> bool:
        """Without waiting, busy or nearly so; False where utilisation is not known."""
        return self.at("utilization") is not None and not self.waits

    @property
    def waits(self) -> bool:
        mean = self.over(lambda card: card.mean)
        gaps = self.over(lambda card: card.gaps) or 0
        return mean is not None and (mean < threshold("mean") or gaps >= threshold("gaps"))

    @property
    def run(self) -> Bench:
        """The run in the middle of its phase's."""
        known = sorted(
            (run for run in self.runs if run.output_tok_s is not None), key=lambda run: run.output_tok_s or 0
        )
        return known[len(known) // 2] if known else Bench()


def loads_of(samples: Sequence[Sample], runs: Sequence[Bench], server: Sequence[ServerSample]) -> list[Load]:
    if apart(samples, server):
        server = ()
    pieces = _pieces(_named(samples, runs), [item.time for item in server if item.running])
    quiet = re.compile(table()["quiet"])
    loud = {phase: found for phase, found in pieces.items() if not quiet.match(phase)}
    loads = [_load(phase, found, runs, server, alone=len(loud) == 1) for phase, found in (loud or pieces).items()]
    # A phase in which nothing ran, as the seconds between two, matters only where there is no other.
    worked = [load for load in loads if any((card.mean or 0) >= threshold("active") for card in load.cards)]
    if worked and any(load.runs for load in loads):
        worked = [load for load in loads if load in worked or load.runs]
    return _beside_known_good(worked or loads)


def _beside_known_good(loads: Sequence[Load]) -> list[Load]:
    before = {load.concurrency: load.tokens for load in loads if load.phase.startswith(BASELINE) and load.concurrency}
    return [
        load if load.phase.startswith(BASELINE) else replace(load, before=before.get(load.concurrency or 0))
        for load in loads
    ]


def apart(samples: Sequence[Sample], server: Sequence[ServerSample]) -> bool:
    """Whether the server's counters are of another time than the samples, so that they say nothing of them.

    Times without a date or of another time zone cannot be told from others, so that less than a day apart is not.
    """
    if not samples or not server or not (_dated(samples[0].time) and _dated(server[0].time)):
        return False
    begin, end = min(sample.time for sample in samples), max(sample.time for sample in samples)
    return all(item.time < begin - _DAY or item.time > end + _DAY for item in server)


_DAY = 86400.0


def _dated(at: float) -> bool:
    """Whether a time is of the epoch, not a file's own count of seconds or a time of day."""
    return at > 1e8


def _named(samples: Sequence[Sample], runs: Sequence[Bench]) -> list[Sample]:
    """In order of time; where the file names no phase, named by the runs whose times are known."""
    ordered = sorted(samples, key=lambda sample: sample.time)
    timed = [run for run in runs if run.started is not None and run.ended is not None]
    if any(sample.phase for sample in ordered) or not timed:
        return ordered

    def phase(at: float) -> str:
        run = next((run for run in timed if (run.started or 0) <= at <= (run.ended or 0)), None)
        return (run.phase or f"c={run.concurrency or 0:g}") if run else "between"

    named = [replace(sample, phase=phase(sample.time)) for sample in ordered]
    return named if any(sample.phase != "between" for sample in named) else ordered


def _pieces(samples: Sequence[Sample], asked: Sequence[float]) -> dict[str, list[Sample]]:
    """The samples of each phase: repetitions (`run c=64 2/3`) together, each without what is no load. asked: when
    requests were running."""
    turns: list[list[Sample]] = []
    for sample in samples:
        if not turns or turns[-1][-1].phase != sample.phase:
            turns.append([])
        turns[-1].append(sample)
    pieces: dict[str, list[Sample]] = {}
    for turn in turns:
        pieces.setdefault(_once(turn[0].phase), []).extend(_under_load(turn, asked))
    return pieces


def _once(phase: str) -> str:
    """The name of a phase without which repetition it is."""
    return re.sub(r"[\s,#]*\d+\s*(?:/|of)\s*\d+\s*$", "", phase)


def _under_load(samples: list[Sample], asked: Sequence[float]) -> list[Sample]:
    """Without ramp, tail and pauses: between the first and the last moment at which a GPU works as hard as it does in
    this phase. All of them where nothing works or utilisation is not known. What rests with a request is no pause."""
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    if not known or max(known) < threshold("active"):
        return samples
    top = sorted(known)[int(0.95 * (len(known) - 1))]
    level = max(threshold("active"), 0.8 * top)
    hard = [sample.time for sample in samples if (sample.utilization or 0) >= level]
    active = sorted({sample.time for sample in samples if (sample.utilization or 0) >= threshold("active")})
    longest = patience(samples, threshold("pause"))
    pauses = [
        (before, after)
        for before, after in pairwise(active)
        if after - before > longest and not any(before < at < after for at in asked)
    ]
    kept = [
        sample
        for sample in samples
        if hard[0] <= sample.time <= hard[-1]
        and not any(before < sample.time < after for before, after in pauses)
    ]  # fmt: skip
    # A moment of work now and then, in a time without any, is no load.
    ends = [before for before, _ in pauses]
    bursts = Counter((sample.gpu, bisect_left(ends, sample.time)) for sample in kept)
    little = max(bursts.values()) < threshold("samples")
    return samples if little and statistics.fmean(known) < threshold("active") else kept


def _load(
    phase: str, samples: Sequence[Sample], runs: Sequence[Bench], server: Sequence[ServerSample], alone: bool
) -> Load:
    begin, end = (samples[0].time, samples[-1].time) if samples else (0.0, 0.0)
    stated = re.search(r"\bc(?:oncurrency)?\s*[=:]?\s*(\d+)", phase)
    concurrency = float(stated[1]) if stated else None
    mine = _runs_of(phase, concurrency, (begin, end), runs, alone)
    concurrency = concurrency or median(run.concurrency for run in mine)
    counted = tuple(item for item in server if begin <= item.time <= end) or (tuple(server) if alone else ())
    kind = _kind(phase, mine)
    tokens, by_server = _tokens(mine, counted)
    if by_server and kind == "prefill":
        tokens = tokens or None  # the server counts what is generated, which a long prefill has not begun
    own = _without_idle_half(samples) if tokens != 0 else samples
    return Load(
        phase, tuple(own), cards_of(own), mine, counted, end - begin, concurrency, tokens, by_server, kind
    )  # fmt: skip


def _runs_of(
    phase: str, concurrency: float | None, span: tuple[float, float], runs: Sequence[Bench], alone: bool
) -> tuple[Bench, ...]:
    """The runs of a phase: those that name it, else of its time, else of its concurrency, else all if it is the only
    phase; of several concurrencies then the highest's."""

    def overlaps(run: Bench) -> bool:
        return run.started is not None and run.ended is not None and run.started < span[1] and span[0] < run.ended

    def same(run: Bench) -> bool:
        return bool(phase) and _once(run.phase) == phase

    for belongs in (same, overlaps, lambda run: concurrency is not None and run.concurrency == concurrency):
        found = tuple(filter(belongs, runs))
        if found:
            return found
    if not alone:
        return ()
    most = max((run.concurrency or 0 for run in runs), default=0)
    return tuple(run for run in runs if (run.concurrency or 0) == most)


def _tokens(runs: Sequence[Bench], server: Sequence[ServerSample]) -> tuple[float | None, bool]:
    """Output tokens per second, and whether only the server says so."""
    rates = [0.0 if run.completed == 0 else run.output_tok_s for run in runs]
    if any(rate is not None for rate in rates):
        return median(rates), False
    return median(item.gen_throughput for item in server), True


def _kind(phase: str, runs: Sequence[Bench]) -> str:
    """What a phase mostly does: what it is called, or what its requests spend their time on."""
    for word in ("prefill", "decode"):
        if word in phase.lower():
            return word
    first = median(ratio(run.ttft, run.e2e) for run in runs)
    if first is None:
        return ""
    return "decode" if first <= 0.3 else "prefill" if first >= 0.7 else ""


def cards_of(samples: Sequence[Sample]) -> tuple[Card, ...]:
    """The GPUs that take part: one without work and without memory in use is another's, or nobody's."""
    cards = [_card(gpu, found) for gpu, found in by_gpu(samples).items()]

    def spare(card: Card) -> bool:
        return card.mean is not None and card.mean < threshold("active") / 2 and (card.used or 0) < 0.1

    return tuple(card for card in cards if not spare(card)) or tuple(cards)


def _without_idle_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Without GPUs that do nothing, where they are half of all or more and the others work: they are another server's,
    as a rank waits for the others at full utilisation."""
    cards = cards_of(samples)
    idle = {card.gpu for card in cards if card.mean is not None and card.mean < threshold("active") / 2}
    rest = [sample for sample in samples if sample.gpu not in idle]
    return rest if rest and 2 * len(idle) >= len(cards) and not spins(rest) else samples


def spins(samples: Sequence[Sample]) -> bool:
    """Whether GPUs that are busy only wait: little power, and no weights are read."""
    cards = cards_of(samples)
    shares = [card.power for card in cards]
    power, reads = median(shares), median(card.at["memory_utilization"] for card in cards)
    if power is None or power > threshold("spinning"):
        return False
    return power <= threshold("spinning_surely") if reads is None else reads <= threshold("spinning_memory")


def _card(gpu: str, samples: Sequence[Sample]) -> Card:
    fields = (
        *HARDWARE, "utilization", "memory_utilization", "memory_clock", "memory_clock_max", "memory_used",
        "memory_total", "pcie_rx", "pcie_tx", "pcie_gen", "pcie_width", "temperature",
    )  # fmt: skip
    busy = [sample.utilization for sample in samples if sample.utilization is not None]
    reasons = [sample.reasons for sample in samples if sample.reasons is not None]
    # A slowdown by the hardware is heat's where it is hot, and power's otherwise.
    hot = (median(sample.temperature for sample in samples) or 0) >= threshold("hot")
    heat, held = (HEAT | SLOWDOWN, NO_POWER) if hot else (HEAT, NO_POWER | SLOWDOWN)

    def said(bits: int) -> float | None:
        # One bit of heat explains a slowdown of the hardware, so that it is not counted for power as well.
        found = [mask & ~SLOWDOWN if mask & HEAT and not bits & HEAT else mask for mask in reasons]
        return sum(bool(mask & bits) for mask in found) / len(found) if 2 * len(found) >= len(samples) else None

    return Card(
        gpu, len(samples), next((sample.name for sample in samples if sample.name), ""),
        mean=statistics.fmean(busy) if busy else None,
        gaps=sum(value < threshold("gap") for value in busy) / len(busy) if busy else 0.0,
        at={field: median(getattr(sample, field) for sample in samples) for field in fields},
        heat=said(heat), held=said(held), other=said(heat | held),
    )  # fmt: skip


@cache
def table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(knowledge.read("diagnosis.json"))
    return table


def threshold(name: str) -> float:
    return float(table()["thresholds"][name]["value"])


@cache
def known_card(name: str) -> dict[str, Any]:
    """What is known of a card by its name: a GH200 is no H200."""

    def named(words: str) -> bool:
        return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", name, re.IGNORECASE) is not None

    return next((row for row in table()["skus"] if named(row["match"])), {})


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
