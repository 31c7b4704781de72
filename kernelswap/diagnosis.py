"""Reads samples of GPUs and the benchmark's rates: what limits this server, by which figures, and what to try.

A pure function and never a gate. Thresholds, GPUs, and what each finding means are data: knowledge/diagnosis.json.
What is not known is not taken for 0, and each phase is judged by itself.
"""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kernelswap.agent import knowledge
from kernelswap.measured import BASELINE
from kernelswap.traces import Bench, Sample, ServerSample

_NO_POWER, _HEAT, _SLOWDOWN = 0x4 | 0x80 | 0x200, 0x20 | 0x40, 0x8
_HARDWARE = ("power", "power_limit", "sm_clock", "sm_clock_max")


@dataclass(frozen=True)
class Figure:
    """One number that a finding rests on."""

    what: str
    value: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.value:{'.0f' if self.value >= 1000 else '.4g'}} {self.unit}".rstrip()


@dataclass(frozen=True)
class Finding:
    """What limits the server in one phase. name: a row of knowledge/diagnosis.json; headline: it in one line with its
    figures; next: what to do, the likeliest first; alternatives: what else would look so; source: where it was seen.
    """

    name: str
    headline: str
    phase: str = ""
    evidence: tuple[Figure, ...] = ()
    next: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    source: str = ""


def diagnose(
    samples: Sequence[Sample], runs: Sequence[Bench] = (), server: Sequence[ServerSample] = ()
) -> tuple[Finding, ...]:
    """The findings, the one to look at first in front; never none. Phases without load are left out where others are.

    runs: the benchmark's, in any order; each belongs to the phase that it names, or whose time or concurrency is its.
    """
    loads = _beside_known_good(_loads(samples, runs, server))
    if not loads:
        return (_finding("unknown", "no samples"),)
    most = max((load.concurrency or 0 for load in loads), default=0)
    ranked = []
    for load in loads:
        lesser = load.concurrency is not None and load.concurrency < most
        for finding in _judge(load):
            ranked.append((load.phase.startswith(BASELINE), lesser, _weight(finding, load), -load.seconds, finding))
    return tuple(item[-1] for item in sorted(ranked, key=lambda item: item[:-1]))


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


def _beside_known_good(loads: Sequence[_Load]) -> list[_Load]:
    before = {load.concurrency: load.tokens for load in loads if load.phase.startswith(BASELINE) and load.concurrency}
    return [
        load if load.phase.startswith(BASELINE) else replace(load, before=before.get(load.concurrency or 0))
        for load in loads
    ]


# What is known.


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(knowledge.read("diagnosis.json"))
    return table


def _weight(finding: Finding, load: _Load) -> float:
    """The rank of a finding. A prefill at the card's own power limit is sound, so that it hides nothing."""
    names = [row["name"] for row in _table()["findings"]]
    sound = finding.name == "power-cap" and load.kind == "prefill" and not _lowered(load) and not _braked(load)
    return names.index(_SOUND[0]) - 0.5 if sound else names.index(finding.name)


def _limit(name: str) -> float:
    return float(_table()["thresholds"][name]["value"])


@cache
def _sku(name: str) -> dict[str, Any]:
    """What is known of a card by its name: a GH200 is no H200."""

    def named(words: str) -> bool:
        return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", name, re.IGNORECASE) is not None

    return next((row for row in _table()["skus"] if named(row["match"])), {})


def _finding(name: str, detail: str, evidence: Iterable[Figure | None] = (), phase: str = "") -> Finding:
    row = next(row for row in _table()["findings"] if row["name"] == name)
    figures = tuple(figure for figure in evidence if figure)
    headline = f"{row['what']}: {detail}"
    return Finding(name, headline, phase, figures, tuple(row["next"]), tuple(row["alternatives"]), row["source"])


# What one GPU did, and all of them, in one phase under load.


@dataclass(frozen=True)
class _Card:
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
        return _sku(self.name)

    @property
    def power(self) -> float | None:
        """Share of the power limit; the card's own limit where the enforced one is not known."""
        return _ratio(self.at["power"], self.at["power_limit"] or self.sku.get("power_limit"))

    @property
    def clock(self) -> float | None:
        """Share of the maximum, or of the card's boost clock where NVML tells a maximum that no work reaches."""
        top = self.at["sm_clock_max"]
        return _ratio(self.at["sm_clock"], min(top, self.sku.get("boost", top)) if top else None)

    @property
    def memory_clock(self) -> float | None:
        return _ratio(self.at["memory_clock"], self.at["memory_clock_max"])

    @property
    def used(self) -> float | None:
        share = _ratio(self.at["memory_used"], self.at["memory_total"] or self.sku.get("memory"))
        return share if share is None or share <= 1.05 else None  # a file of mixed units

    @property
    def transfer(self) -> float | None:
        """MB/s over PCIe in the fuller direction."""
        return max((rate for rate in (self.at["pcie_rx"], self.at["pcie_tx"]) if rate is not None), default=None)

    @property
    def link(self) -> float | None:
        """MB/s that its PCIe link carries in one direction."""
        lane = _table()["pcie"]["lane"].get(f"{self.at['pcie_gen'] or 0:.0f}")
        return lane * self.at["pcie_width"] if lane and self.at["pcie_width"] else None

    @property
    def heated(self) -> bool:
        """Heat holds its clocks down: so NVML says, or it is hot and slow and NVML says no other reason."""
        if self.heat is not None and self.heat >= (
            _limit("heated") if (self.held or 0) < _limit("capped") else _limit("capped")
        ):
            return True
        hot = (self.at["temperature"] or 0) >= _limit("hot")
        slow = self.clock is not None and self.clock < _limit("clocks") and not self.limited
        return hot and slow and (self.other is None or self.other < _limit("capped"))

    @property
    def limited(self) -> bool:
        """Power holds it: so NVML says, or it draws all that it may and NVML says nothing, or the clocks are down."""
        if self.held is not None and self.held >= _limit("capped"):
            return True
        free = self.held is not None and self.clock is not None and self.clock >= _limit("clocks")
        return self.power is not None and self.power >= _limit("at_limit") and not free


@dataclass(frozen=True)
class _Load:
    """One phase under load: its samples without ramp, tail and pauses, what each GPU did, and what came of it.

    tokens: output tokens per second, 0 if none came; None if it is not known. counted_only: they are the server's word,
    which stands still when the server does. kind: prefill, decode, or "". before:
    the tokens of the known-good at the same concurrency, where it was measured too.
    """

    phase: str
    samples: tuple[Sample, ...]
    cards: tuple[_Card, ...]
    runs: tuple[Bench, ...]
    server: tuple[ServerSample, ...]
    seconds: float
    concurrency: float | None
    tokens: float | None
    counted_only: bool
    kind: str
    before: float | None = None

    def over(self, what: Callable[[_Card], float | None]) -> float | None:
        """The median over the GPUs of what is known of them."""
        return _median(what(card) for card in self.cards)

    def at(self, field: str) -> float | None:
        return self.over(lambda card: card.at[field])

    def share(self, holds: Callable[[_Card], bool]) -> float:
        return sum(map(holds, self.cards)) / len(self.cards)

    def counted(self, field: str) -> float | None:
        """The median of one of the server's counters."""
        return _median(getattr(sample, field) for sample in self.server)

    @property
    def busy(self) -> bool:
        """Busy throughout; False where utilisation is not known."""
        return self.works and (self.at("utilization") or 0) >= _limit("busy")

    @property
    def works(self) -> bool:
        """Without waiting, busy or nearly so; False where utilisation is not known."""
        return self.at("utilization") is not None and not self.waits

    @property
    def waits(self) -> bool:
        mean = self.over(lambda card: card.mean)
        gaps = self.over(lambda card: card.gaps) or 0
        return mean is not None and (mean < _limit("mean") or gaps >= _limit("gaps"))

    @property
    def run(self) -> Bench:
        """The run in the middle of its phase's."""
        known = sorted(
            (run for run in self.runs if run.output_tok_s is not None), key=lambda run: run.output_tok_s or 0
        )
        return known[len(known) // 2] if known else Bench()


def _loads(samples: Sequence[Sample], runs: Sequence[Bench], server: Sequence[ServerSample]) -> list[_Load]:
    if apart(samples, server):
        server = ()
    pieces = _pieces(_named(samples, runs), [item.time for item in server if item.running])
    quiet = re.compile(_table()["quiet"])
    loud = {phase: found for phase, found in pieces.items() if not quiet.match(phase)}
    loads = [_load(phase, found, runs, server, alone=len(loud) == 1) for phase, found in (loud or pieces).items()]
    # A phase in which nothing ran, as the seconds between two, matters only where there is no other.
    worked = [load for load in loads if any((card.mean or 0) >= _limit("active") for card in load.cards)]
    if worked and any(load.runs for load in loads):
        return [load for load in loads if load in worked or load.runs]
    return worked or loads


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
        name = re.sub(r"[\s,#]*\d+\s*(?:/|of)\s*\d+\s*$", "", turn[0].phase)
        pieces.setdefault(name, []).extend(_under_load(turn, asked))
    return pieces


def _under_load(samples: list[Sample], asked: Sequence[float]) -> list[Sample]:
    """Without ramp, tail and pauses: between the first and the last moment at which a GPU works as hard as it does in
    this phase. All of them where nothing works or utilisation is not known. What rests with a request is no pause."""
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    if not known or max(known) < _limit("active"):
        return samples
    top = sorted(known)[int(0.95 * (len(known) - 1))]
    level = max(_limit("active"), 0.8 * top)
    hard = [sample.time for sample in samples if (sample.utilization or 0) >= level]
    times = sorted({sample.time for sample in samples})
    usual = _median(after - before for before, after in _pairs(times)) or 0
    active = sorted({sample.time for sample in samples if (sample.utilization or 0) >= _limit("active")})
    patience = max(_limit("pause"), 4 * usual)
    pauses = [
        (before, after)
        for before, after in _pairs(active)
        if after - before > patience and not any(before < at < after for at in asked)
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
    little = max(bursts.values()) < _limit("samples")
    return samples if little and statistics.fmean(known) < _limit("active") else kept


def _pairs(times: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Each moment with the next one."""
    for number in range(1, len(times)):
        yield times[number - 1], times[number]


def _load(
    phase: str, samples: Sequence[Sample], runs: Sequence[Bench], server: Sequence[ServerSample], alone: bool
) -> _Load:
    begin, end = (samples[0].time, samples[-1].time) if samples else (0.0, 0.0)
    stated = re.search(r"\bc(?:oncurrency)?\s*[=:]?\s*(\d+)", phase)
    concurrency = float(stated[1]) if stated else None
    mine = _runs_of(phase, concurrency, (begin, end), runs, alone)
    concurrency = concurrency or _median(run.concurrency for run in mine)
    counted = tuple(item for item in server if begin <= item.time <= end) or (tuple(server) if alone else ())
    kind = _kind(phase, mine)
    tokens, by_server = _tokens(mine, counted)
    if by_server and kind == "prefill":
        tokens = tokens or None  # the server counts what is generated, which a long prefill has not begun
    own = _without_idle_half(samples) if tokens != 0 else samples
    return _Load(
        phase, tuple(own), _cards(own), mine, counted, end - begin, concurrency, tokens, by_server, kind
    )  # fmt: skip


def _runs_of(
    phase: str, concurrency: float | None, span: tuple[float, float], runs: Sequence[Bench], alone: bool
) -> tuple[Bench, ...]:
    """The runs of a phase: those that name it, else of its time, else of its concurrency, else all if it is the only
    phase; of several concurrencies then the highest's."""

    def overlaps(run: Bench) -> bool:
        return run.started is not None and run.ended is not None and run.started < span[1] and span[0] < run.ended

    def same(run: Bench) -> bool:
        name = re.sub(r"[\s,#]*\d+\s*(?:/|of)\s*\d+\s*$", "", run.phase)
        return bool(name) and name == phase

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
        return _median(rates), False
    return _median(item.gen_throughput for item in server), True


def _kind(phase: str, runs: Sequence[Bench]) -> str:
    """What a phase mostly does: what it is called, or what its requests spend their time on."""
    for word in ("prefill", "decode"):
        if word in phase.lower():
            return word
    first = _median(_ratio(run.ttft, run.e2e) for run in runs)
    if first is None:
        return ""
    return "decode" if first <= 0.3 else "prefill" if first >= 0.7 else ""


def _cards(samples: Sequence[Sample]) -> tuple[_Card, ...]:
    """The GPUs that take part: one without work and without memory in use is another's, or nobody's."""
    apart: dict[str, list[Sample]] = {}
    for sample in samples:
        apart.setdefault(sample.gpu, []).append(sample)
    cards = [_card(gpu, found) for gpu, found in apart.items()]

    def spare(card: _Card) -> bool:
        return card.mean is not None and card.mean < _limit("active") / 2 and (card.used or 0) < 0.1

    return tuple(card for card in cards if not spare(card)) or tuple(cards)


def _without_idle_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Without GPUs that do nothing, where they are half of all or more and the others work: they are another server's,
    as a rank waits for the others at full utilisation."""
    cards = _cards(samples)
    idle = {card.gpu for card in cards if card.mean is not None and card.mean < _limit("active") / 2}
    rest = [sample for sample in samples if sample.gpu not in idle]
    return rest if rest and 2 * len(idle) >= len(cards) and not _spins(rest) else samples


def _card(gpu: str, samples: Sequence[Sample]) -> _Card:
    fields = (
        *_HARDWARE, "utilization", "memory_utilization", "memory_clock", "memory_clock_max", "memory_used",
        "memory_total", "pcie_rx", "pcie_tx", "pcie_gen", "pcie_width", "temperature",
    )  # fmt: skip
    busy = [sample.utilization for sample in samples if sample.utilization is not None]
    reasons = [sample.reasons for sample in samples if sample.reasons is not None]
    # A slowdown by the hardware is heat's where it is hot, and power's otherwise.
    hot = (_median(sample.temperature for sample in samples) or 0) >= _limit("hot")
    heat, held = (_HEAT | _SLOWDOWN, _NO_POWER) if hot else (_HEAT, _NO_POWER | _SLOWDOWN)

    def said(bits: int) -> float | None:
        # One bit of heat explains a slowdown of the hardware, so that it is not counted for power as well.
        found = [mask & ~_SLOWDOWN if mask & _HEAT and not bits & _HEAT else mask for mask in reasons]
        return sum(bool(mask & bits) for mask in found) / len(found) if 2 * len(found) >= len(samples) else None

    return _Card(
        gpu, len(samples), next((sample.name for sample in samples if sample.name), ""),
        mean=statistics.fmean(busy) if busy else None,
        gaps=sum(value < _limit("gap") for value in busy) / len(busy) if busy else 0.0,
        at={field: _median(getattr(sample, field) for sample in samples) for field in fields},
        heat=said(heat), held=said(held), other=said(heat | held),
    )  # fmt: skip


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


# The rules. Each says on what it rests, or None; their order of weight is that of the data.


def _judge(load: _Load) -> Iterator[Finding]:
    needed = _limit("samples")
    if max((card.count for card in load.cards), default=0) < needed:
        detail = (
            f"{max((card.count for card in load.cards), default=0)} samples of a GPU under load, {needed:g} are needed"
        )
        yield _finding("unknown", detail, (), load.phase)
        return
    found: list[Finding] = []
    for name, rule in _RULES.items():
        said = rule(load)
        if said and not (found and name in _SOUND) and not _contradicts(name, found):
            found.append(_finding(name, said[0], (*said[1], *_figures(load)), load.phase))
    yield from found or [_otherwise(load)]


def _contradicts(name: str, found: Sequence[Finding]) -> bool:
    """Where nothing moves, clocks are down or a link is full, kernels are not what is to be looked at."""
    others = ("hang", "clocks-down", "transfer-bound")
    return name == "busy-not-loaded" and any(finding.name in others for finding in found)


_Said = tuple[str, tuple[Figure, ...]] | None


def _hang(load: _Load) -> _Said:
    level = load.at("utilization")
    if level is None:
        return None
    no_tokens = load.tokens == 0
    pending = (load.counted("running") or 0) > 0
    if no_tokens and (level >= _limit("busy") or pending):
        wedged = (load.over(lambda card: card.used) or 1) < 0.02
        return f"{level:.0f} % utilisation, 0 tokens/s{', and nothing in their memory' if wedged else ''}", ()
    unproved = load.tokens is None or (load.counted_only and _stands_still(load))
    if unproved and level >= _limit("busy") and _spins(load.samples) and not _dim(load):
        return f"{level:.0f} % utilisation at {_watts(load)}, without the traffic in memory that tokens need", ()
    return _stuck(load) or _dried_up(load)


def _stands_still(load: _Load) -> bool:
    """Whether the server's rate never changes, as it does when nobody counts any more."""
    made = [item.gen_throughput for item in load.server if item.gen_throughput is not None]
    return len(made) >= _limit("samples") and len(set(made)) == 1


def _dried_up(load: _Load) -> _Said:
    """A run that began well and ends without tokens, with requests still running; whatever the GPUs do meanwhile."""
    if load.kind == "prefill" or not load.samples:
        return None
    known = [item for item in load.server if item.gen_throughput is not None and item.running is not None]
    made = [item for item in known if item.gen_throughput]
    dry = known[known.index(made[-1]) + 1 :] if made else []
    lasts = dry[-1].time - dry[0].time if dry else 0.0
    if len(dry) < 3 or lasts < max(_limit("stuck"), 0.15 * load.seconds) or not all(item.running for item in dry):
        return None
    rate, running = _median(item.gen_throughput for item in made), _median(item.running for item in dry)
    text = f"0 tokens/s for the last {lasts:.0f} s with {running:.0f} request(s) running, after {rate:.0f} tokens/s"
    return text, _some(("tokens/s before", rate, ""), ("requests running", running, ""))


def _dim(load: _Load) -> bool:
    """Whether little power has another reason, where it is not known if memory is read: one GPU waits for no other,
    decoding takes little on some, and low clocks do on all."""
    if load.at("memory_utilization") is not None:
        return False
    clock = load.over(lambda card: card.clock)
    return len(load.cards) == 1 or _normal(load) or (clock is not None and clock < _limit("clocks"))


def _spins(samples: Sequence[Sample]) -> bool:
    """Whether GPUs that are busy only wait: little power, and no weights are read."""
    cards = _cards(samples)
    shares = [card.power for card in cards]
    power, reads = _median(shares), _median(card.at["memory_utilization"] for card in cards)
    if power is None or power > _limit("spinning"):
        return False
    return power <= _limit("spinning_surely") if reads is None else reads <= _limit("spinning_memory")


def _stuck(load: _Load) -> _Said:
    """A run that began well and ends in waiting: its last seconds at full utilisation and little power."""
    end = load.samples[-1].time
    limit = max(_limit("stuck"), 0.15 * load.seconds)
    tail = [sample for sample in load.samples if sample.time >= end - limit]
    before = [sample for sample in load.samples if sample.time < end - limit]
    unread = load.over(lambda card: card.power) is None and _unread(tail)
    if not before or not _all_busy(tail) or not (_spins(tail) or unread):
        return None
    was, now = (_median(card.at["power"] for card in _cards(part)) for part in (before, tail))
    if was is None or now is None or now > 0.7 * was:
        return None
    lost = any(
        run.completed is not None and run.requests is not None and run.completed < run.requests for run in load.runs
    )
    done = all(run.completed is not None and run.completed == run.requests for run in load.runs) and bool(load.runs)
    if done and not lost:
        return None
    text = f"for the last {limit:.0f} s at full utilisation and {now:.0f} W, after {was:.0f} W"
    return text, (Figure("power before", was, "W"), Figure("power at the end", now, "W"))


def _unread(samples: Sequence[Sample]) -> bool:
    """Whether no weights are read from memory; False where that is not known."""
    reads = _median(card.at["memory_utilization"] for card in _cards(samples))
    return reads is not None and reads <= _limit("spinning_memory")


def _all_busy(samples: Sequence[Sample]) -> bool:
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    return len(known) >= 3 and (_median(known) or 0) >= _limit("busy")


def _thermal(load: _Load) -> _Said:
    share = load.share(lambda card: card.heated)
    odd = _odd(load)
    if share < _limit("capped") and not any(card.heated for card in odd):
        return None
    hot = [card for card in load.cards if card.heated]
    text = f"{_gpus(hot, load)} at {_text(_median(card.at['temperature'] for card in hot), '°C')}, {_clocks(hot)}"
    return text, _some(("samples held by heat", _percent(_median(card.heat for card in hot)), "%"))


def _slow_rank(load: _Load) -> _Said:
    odd = _odd(load)
    limited = load.share(lambda card: card.limited)
    common = _limit("capped") <= limited < 1 and all(card.limited for card in odd)
    if not odd or common or load.share(lambda card: card.heated) >= _limit("capped"):
        return None
    rest = [card for card in load.cards if card not in odd]
    names = [" and ".join(sorted({card.name for card in cards if card.name})) for cards in (odd, rest)]
    parts = [f"{names[0]} instead of {names[1]}"] if all(names) and names[0] != names[1] else []
    figures: list[Figure] = []
    for what, unit, value in (
        ("SM clock", "MHz", lambda card: card.at["sm_clock"]),
        ("power", "W", lambda card: card.at["power"]),
        ("utilisation", "%", lambda card: card.at["utilization"]),
        ("temperature", "°C", lambda card: card.at["temperature"]),
        ("PCIe link", "MB/s", lambda card: card.link),
        ("held by heat", "% of its samples", lambda card: _percent(card.heat)),
        ("held by power", "% of its samples", lambda card: _percent(card.held)),
    ):
        mine, theirs = _median(map(value, odd)), _median(map(value, rest))
        if mine is None or theirs is None or abs(mine - theirs) <= 0.1 * max(abs(mine), abs(theirs)):
            continue
        parts.append(f"{what} {mine:.0f} instead of {theirs:.0f} {unit}")
        figures += [Figure(f"{what}, odd", mine, unit), Figure(f"{what}, others", theirs, unit)]
    return f"{_gpus(odd, load)}: {', '.join(parts) or 'differs'}", tuple(figures)


def _odd(load: _Load) -> list[_Card]:
    """The minority of the GPUs that differs from the others."""
    cards = load.cards
    if len(cards) < 2:
        return []
    odd = [card for card in cards if _differs(card, cards, both=True)]
    if len(odd) > _limit("odd_share") * len(cards) or len(cards) == 2:
        odd = [card for card in cards if _differs(card, cards, both=False)]
    return odd if len(odd) <= _limit("odd_share") * len(cards) else []


def _differs(card: _Card, cards: Sequence[_Card], both: bool) -> bool:
    """both: whether more than the others counts as well as less."""
    others = [other for other in cards if other is not card]

    def usual(field: str) -> float | None:
        return _median(other.at[field] for other in others)

    clock = _ratio(card.at["sm_clock"], usual("sm_clock"))
    power = _ratio(card.at["power"], usual("power"))
    mine, theirs = card.at["utilization"], usual("utilization")
    behind = (theirs - mine) if mine is not None and theirs is not None else 0.0
    apart = _limit("odd_power")
    lanes = _median(other.link for other in others)
    link = _ratio(card.link, lanes)
    full = card.transfer is None or card.transfer >= _limit("transfer") * (card.link or 0)
    narrow = link is not None and link < (_limit("odd_link") if full else _limit("odd_link_idle"))
    return (
        (clock is not None and clock < _limit("odd_clock"))
        or (power is not None and (power < 1 - apart or (both and power > 1 + apart)))
        or (abs(behind) if both else behind) >= _limit("odd_utilization")
        or (card.heated and not any(other.heated for other in others))
        or narrow
    )


def _power_cap(load: _Load) -> _Said:
    held = [card for card in load.cards if card.limited]
    if load.share(lambda card: card.heated) >= _limit("capped") or len(held) / len(load.cards) < _limit("capped"):
        return None
    share = _median(card.held for card in held)
    if load.waits and share is not None and share < 0.5:
        return None  # most of the time it waits, and meets its limit in between
    own = f", below the card's own {_lowered(load):.0f} W" if _lowered(load) else ""
    brakes = ", by a power brake" if _braked(load) else ", by a slowdown of the hardware" if _slowed(load) else ""
    text = f"{_gpus(held, load)} at {_watts(load, held)}{own}, {_clocks(held)}{brakes}"
    return text, _some(("samples held by power", _percent(share), "%"))


def _lowered(load: _Load) -> float | None:
    """The card's own power limit, where the enforced one is lower."""
    limit, own = load.at("power_limit"), load.over(lambda card: card.sku.get("power_limit"))
    return own if limit and own and limit < 0.95 * own else None


def _braked(load: _Load) -> bool:
    return any(sample.reasons and sample.reasons & 0x80 for sample in load.samples)


def _slowed(load: _Load) -> bool:
    """Whether the hardware gives its slowdown as the reason and no limit of power beside it."""
    known = [sample.reasons for sample in load.samples if sample.reasons]
    return any(mask & _SLOWDOWN for mask in known) and not any(mask & _NO_POWER for mask in known)


def _clocks_down(load: _Load) -> _Said:
    if load.share(lambda card: card.heated or card.limited) >= _limit("capped") or not load.works:
        return None
    alike = [card for card in load.cards if card not in _odd(load)]  # the others are a finding of their own
    parts = []
    for what, share, field in (
        ("SM", _median(card.clock for card in alike), "sm_clock"),
        ("memory", _median(card.memory_clock for card in alike), "memory_clock"),
    ):
        if share and share < _limit("clocks"):
            now, top = (_median(card.at[name] for card in alike) for name in (field, f"{field}_max"))
            parts.append(f"{what} clock {now:.0f} of {top:.0f} MHz")
    if not parts:
        return None
    set_by_hand = [sample for sample in load.samples if sample.reasons is not None and sample.reasons & 0x102]
    unknown = all(sample.reasons is None for sample in load.samples)
    why = " (application clocks are set)" if set_by_hand else " (reasons are not known)" if unknown else ""
    return f"{', '.join(parts)} at {_text(load.at('utilization'), '%')} utilisation, {_watts(load)}{why}", ()


def _transfer(load: _Load) -> _Said:
    rate, link = load.over(lambda card: card.transfer), load.over(lambda card: card.link)
    if rate is None or rate < (_limit("transfer") * link if link else _limit("transfer_rate")):
        return None
    of = f" of {link:.0f}" if link else ""
    return f"{rate:.0f}{of} MB/s in one direction at {_text(load.at('utilization'), '%')} utilisation", ()


def _memory(load: _Load) -> _Said:
    usage, queued = load.counted("token_usage"), load.counted("queued")
    if usage is not None and usage >= _limit("full") and (queued is None or queued > 0):
        text = f"{100 * usage:.0f} % of its tokens used" + (f", {queued:.0f} requests wait" if queued else "")
        return text, _some(("KV cache used", 100 * usage, "%"), ("queued requests", queued, ""))
    run = load.run
    # Without the server's counters: what mostly decodes, and yet waits long for its first token, stood in the queue.
    each = _ratio(run.output_tokens, run.completed)
    whole = run.e2e or (run.ttft + run.itl * each if run.ttft and run.itl and each else None)
    first = _ratio(run.ttft, whole)
    decodes = run.input_tokens and run.output_tokens and run.input_tokens <= 4 * run.output_tokens
    if usage is None and queued is None and decodes and first and first >= _limit("waiting") and load.busy:
        text = f"{100 * first:.0f} % of a request's time passes before its first token, so it waits in the queue"
        return text, _some(("time of a request", whole, "ms"))
    return None


def _host(load: _Load) -> _Said:
    mean = load.over(lambda card: card.mean)
    level = load.at("utilization") or 0
    if mean is None or load.busy:
        return None
    if not load.waits and (load.over(lambda card: card.power) or 0) >= _limit("unloaded"):
        return None
    # With so little of it, what tokens came are not these GPUs'.
    if mean < _limit("active") / (2 if load.tokens else 1):
        return None
    gaps = load.over(lambda card: card.gaps) or 0
    running = load.counted("running")
    few = running is not None and load.concurrency and running < 0.5 * load.concurrency
    why = f", {running:.0f} of {load.concurrency:.0f} requests running: the client sends too little" if few else ""
    text = f"utilisation {mean:.0f} % on average, {100 * gaps:.0f} % of the samples below {_limit('gap'):.0f} %{why}"
    return text, _some(("mean utilisation", mean, "%"), ("median utilisation", level, "%"), ("gaps", 100 * gaps, "%"))


def _sound(load: _Load) -> bool:
    """At work with clocks that nothing holds down, no full link and no full cache: what is left is the work itself."""
    clock = load.over(lambda card: card.clock)
    held = load.share(lambda card: card.heated or card.limited) >= _limit("capped")
    return load.works and not held and (clock is None or clock >= _limit("clocks")) and load.tokens != 0


def _unloaded(load: _Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not load.busy or not _sound(load) or power is None or power >= _limit("unloaded") or _normal(load):
        return None
    text = f"{_text(load.at('utilization'), '%')} utilisation at {_watts(load)}, {_clocks(load.cards)}, no throttle"
    if all(sample.reasons is None for sample in load.samples):
        text = text.replace("no throttle", "throttle reasons not known")
    slow, step = _slowness(load)
    figures = _some(
        ("a decode step against reading the whole memory once", slow, "times"), ("a decode step", step, "ms")
    )
    known_good = f" where the known-good made {load.before:.4g}" if _fell_behind(load) else ""
    return text + (f"; {_rate(load)}{known_good}" if load.tokens else ""), figures


def _decode(load: _Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not load.busy or not _sound(load) or power is None or power >= _limit("unloaded") or not _normal(load):
        return None
    slow, step = _slowness(load)
    because = (
        f"a step takes {slow:.1f} times as long as reading the whole memory once"
        if slow and slow >= _limit("step_least")
        else "usual for this GPU"
    )
    text = f"{_watts(load)}, {because}" + (f"; {_rate(load)}" if load.tokens else "")
    return text, _some(("a decode step", step, "ms"))


def _normal(load: _Load) -> bool:
    """Whether little power is what decoding takes on this GPU.

    With a rate: a step that takes not much longer than reading the memory once is limited by its bandwidth, unless
    memory is seen to rest. Without, or where a step cannot have read it: only in a phase of decoding, in the range that
    was seen on such a card. Never where the known-good did better.
    """
    reads = load.at("memory_utilization")
    if load.kind == "prefill" or _fell_behind(load) or (reads is not None and reads < _limit("idle_memory")):
        return False
    slow, _ = _slowness(load)
    if slow is not None and slow >= _limit("step_least"):
        return slow <= _limit("step")
    power = load.over(lambda card: card.power)
    band = _decode_power(load)
    return load.kind == "decode" and band is not None and power is not None and band[0] <= power <= band[1]


def _fell_behind(load: _Load) -> bool:
    return bool(load.before and load.tokens is not None and load.tokens < _limit("slower") * load.before)


def _decode_power(load: _Load) -> tuple[float, float] | None:
    """The shares of the power limit between which such a card was seen to decode soundly, where that is known."""
    return next((tuple(card.sku["decode_power"]) for card in load.cards if "decode_power" in card.sku), None)


def _slowness(load: _Load) -> tuple[float | None, float | None]:
    """How many times longer a decode step takes than reading the GPU's memory once; and the step in ms."""
    run = load.run
    by_rate = _ratio(run.concurrency or load.concurrency, load.tokens)
    steps = [1000 * by_rate * (run.accept_length or 1)] if by_rate else []
    steps += [run.itl] if run.itl and not run.accept_length else []
    reads = load.over(lambda card: _ratio(card.at["memory_used"] or card.sku.get("memory"), card.sku.get("bandwidth")))
    if not steps:
        return None, None
    return (min(steps) / (reads * 1.048576) if reads else None), min(steps)


def _loaded(load: _Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not _sound(load) or power is None or power < _limit("unloaded"):
        return None
    return f"{_text(load.at('utilization'), '%')} utilisation at {_watts(load)}, {_clocks(load.cards)}", ()


_RULES: dict[str, Callable[[_Load], _Said]] = {
    "hang": _hang,
    "slow-rank": _slow_rank,
    "thermal-cap": _thermal,
    "power-cap": _power_cap,
    "clocks-down": _clocks_down,
    "transfer-bound": _transfer,
    "memory-bound": _memory,
    "host-bound": _host,
    "busy-not-loaded": _unloaded,
    "normal-decode": _decode,
    "loaded": _loaded,
}


_SOUND = ("normal-decode", "loaded")  # said only where nothing else is


def _otherwise(load: _Load) -> Finding:
    """No rule holds: because nothing happened, or because too little is known."""
    level, mean = load.at("utilization"), load.over(lambda card: card.mean)
    own_limit = load.over(lambda card: card.sku.get("power_limit"))
    missing = [
        field
        for field in ("utilization", *_HARDWARE)
        if load.at(field) is None and not (field == "power_limit" and own_limit)
    ]
    if mean is not None and mean < _limit("active"):
        return _finding("idle", f"utilisation {mean:.0f} % on average, {_watts(load)}", _figures(load), load.phase)
    names = {"utilization": "utilisation", "sm_clock": "SM clock", "sm_clock_max": "the SM clock's maximum"}
    lacks = ", ".join(names.get(field, field.replace("_", " ")) for field in missing)
    seen = f"{level:.0f} % utilisation" if level is not None else "utilisation not known"
    return _finding("unknown", f"{seen}; missing: {lacks or 'nothing'}", _figures(load), load.phase)


# In words.


def _figures(load: _Load) -> tuple[Figure, ...]:
    run = load.run
    return _some(
        ("GPUs", len(load.cards), ""),
        ("utilisation", load.at("utilization"), "%"),
        ("power", load.at("power"), "W"),
        ("power limit", load.at("power_limit") or load.over(lambda card: card.sku.get("power_limit")), "W"),
        ("SM clock", load.at("sm_clock"), "MHz"),
        ("SM clock, maximum", load.at("sm_clock_max"), "MHz"),
        ("memory utilisation", load.at("memory_utilization"), "%"),
        ("memory used", _percent(load.over(lambda card: card.used)), "%"),
        ("PCIe", load.over(lambda card: card.transfer), "MB/s"),
        ("PCIe link, narrowest", _narrowest(load), "MB/s"),
        ("temperature", load.at("temperature"), "°C"),
        ("output", load.tokens, "tokens/s"),
        ("concurrency", load.concurrency, ""),
        ("requests not completed", _missed(load), ""),
        ("time to first token", run.ttft, "ms"),
        ("between tokens", run.itl, "ms"),
    )


def _narrowest(load: _Load) -> float | None:
    """What the narrowest PCIe link carries, where it is not what the others do."""
    links = sorted(card.link for card in load.cards if card.link)
    return links[0] if links and links[0] < _limit("odd_link") * statistics.median(links) else None


def _missed(load: _Load) -> float | None:
    """Of the benchmark's requests, those that were not completed; None where that is not known, or is none."""
    return (
        sum((run.requests or 0) - run.completed for run in load.runs if run.requests and run.completed is not None)
        or None
    )


def _some(*rows: tuple[str, float | None, str]) -> tuple[Figure, ...]:
    return tuple(Figure(what, value, unit) for what, value, unit in rows if value is not None)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _text(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}"


def _watts(load: _Load, cards: Sequence[_Card] = ()) -> str:
    power = _median(card.at["power"] for card in cards or load.cards)
    share = _median(card.power for card in cards or load.cards)
    if power is None:
        return "power not known"
    return f"{power:.0f} of {power / share:.0f} W ({100 * share:.0f} %)" if share else f"{power:.0f} W"


def _clocks(cards: Sequence[_Card]) -> str:
    now, top = _median(card.at["sm_clock"] for card in cards), _median(card.at["sm_clock_max"] for card in cards)
    if now is None:
        return "clocks not known"
    return f"SM clock {now:.0f} of {top:.0f} MHz" if top else f"SM clock {now:.0f} MHz"


def _gpus(cards: Sequence[_Card], load: _Load) -> str:
    if len(cards) == len(load.cards):
        return "all GPUs" if len(cards) > 1 else f"GPU {cards[0].gpu}"
    named = ", ".join(sorted((card.gpu for card in cards), key=lambda gpu: (len(gpu), gpu)))
    return f"GPU {named} of {len(load.cards)}" if len(cards) == 1 else f"GPUs {named} of {len(load.cards)}"


def _rate(load: _Load) -> str:
    at = f" at {load.concurrency:.0f} requests" if load.concurrency else ""
    return f"{load.tokens or 0:.4g} tokens/s{at}"
