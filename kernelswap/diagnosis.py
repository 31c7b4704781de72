"""Reads samples of GPUs and the benchmark's rates: what limits this server, by which figures, and what to try.

A pure function and never a gate. Thresholds, GPUs, and what each finding means are data: knowledge/diagnosis.json.
What is not known is not taken for 0, and each phase is judged by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kernelswap.loads import (
    HARDWARE,
    NO_POWER,
    SLOWDOWN,
    Card,
    Load,
    cards_of,
    loads_of,
    median,
    ratio,
    spins,
    table,
    threshold,
)
from kernelswap.measured import BASELINE
from kernelswap.traces import Bench, Sample, ServerSample


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
    loads = loads_of(samples, runs, server)
    if not loads:
        return (_finding("unknown", "no samples"),)
    most = max((load.concurrency or 0 for load in loads), default=0)
    ranked = []
    for load in loads:
        lesser = load.concurrency is not None and load.concurrency < most
        for finding in _judge(load):
            ranked.append((load.phase.startswith(BASELINE), lesser, _weight(finding, load), -load.seconds, finding))
    return tuple(item[-1] for item in sorted(ranked, key=lambda item: item[:-1]))


def _weight(finding: Finding, load: Load) -> float:
    """The rank of a finding. A prefill at the card's own power limit is sound, so that it hides nothing."""
    names = [row["name"] for row in table()["findings"]]
    sound = finding.name == "power-cap" and load.kind == "prefill" and not _lowered(load) and not _braked(load)
    return names.index(_SOUND[0]) - 0.5 if sound else names.index(finding.name)


def _finding(name: str, detail: str, evidence: Iterable[Figure | None] = (), phase: str = "") -> Finding:
    row = next(row for row in table()["findings"] if row["name"] == name)
    figures = tuple(figure for figure in evidence if figure)
    headline = f"{row['what']}: {detail}"
    return Finding(name, headline, phase, figures, tuple(row["next"]), tuple(row["alternatives"]), row["source"])


# The rules. Each says on what it rests, or None; their order of weight is that of the data.


def _judge(load: Load) -> Iterator[Finding]:
    needed = threshold("samples")
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


def _hang(load: Load) -> _Said:
    level = load.at("utilization")
    if level is None:
        return None
    no_tokens = load.tokens == 0
    pending = (load.counted("running") or 0) > 0
    if no_tokens and (level >= threshold("busy") or pending):
        wedged = (load.over(lambda card: card.used) or 1) < 0.02
        return f"{level:.0f} % utilisation, 0 tokens/s{', and nothing in their memory' if wedged else ''}", ()
    unproved = load.tokens is None or (load.counted_only and _stands_still(load))
    if unproved and level >= threshold("busy") and spins(load.samples) and not _dim(load):
        return f"{level:.0f} % utilisation at {_watts(load)}, without the traffic in memory that tokens need", ()
    return _stuck(load) or _dried_up(load)


def _stands_still(load: Load) -> bool:
    """Whether the server's rate never changes, as it does when nobody counts any more."""
    made = [item.gen_throughput for item in load.server if item.gen_throughput is not None]
    return len(made) >= threshold("samples") and len(set(made)) == 1


def _dried_up(load: Load) -> _Said:
    """A run that began well and ends without tokens, with requests still running; whatever the GPUs do meanwhile."""
    if load.kind == "prefill" or not load.samples:
        return None
    known = [item for item in load.server if item.gen_throughput is not None and item.running is not None]
    made = [item for item in known if item.gen_throughput]
    dry = known[known.index(made[-1]) + 1 :] if made else []
    lasts = dry[-1].time - dry[0].time if dry else 0.0
    if len(dry) < 3 or lasts < max(threshold("stuck"), 0.15 * load.seconds) or not all(item.running for item in dry):
        return None
    rate, running = median(item.gen_throughput for item in made), median(item.running for item in dry)
    text = f"0 tokens/s for the last {lasts:.0f} s with {running:.0f} request(s) running, after {rate:.0f} tokens/s"
    return text, _some(("tokens/s before", rate, ""), ("requests running", running, ""))


def _dim(load: Load) -> bool:
    """Whether little power has another reason, where it is not known if memory is read: one GPU waits for no other,
    decoding takes little on some, and low clocks do on all."""
    if load.at("memory_utilization") is not None:
        return False
    clock = load.over(lambda card: card.clock)
    return len(load.cards) == 1 or _normal(load) or (clock is not None and clock < threshold("clocks"))


def _stuck(load: Load) -> _Said:
    """A run that began well and ends in waiting: its last seconds at full utilisation and little power."""
    end = load.samples[-1].time
    limit = max(threshold("stuck"), 0.15 * load.seconds)
    tail = [sample for sample in load.samples if sample.time >= end - limit]
    before = [sample for sample in load.samples if sample.time < end - limit]
    unread = load.over(lambda card: card.power) is None and _unread(tail)
    if not before or not _all_busy(tail) or not (spins(tail) or unread):
        return None
    was, now = (median(card.at["power"] for card in cards_of(part)) for part in (before, tail))
    if was is None or now is None or now > 0.7 * was:
        return None
    if load.runs and all(run.completed is not None and run.completed == run.requests for run in load.runs):
        return None
    text = f"for the last {limit:.0f} s at full utilisation and {now:.0f} W, after {was:.0f} W"
    return text, (Figure("power before", was, "W"), Figure("power at the end", now, "W"))


def _unread(samples: Sequence[Sample]) -> bool:
    """Whether no weights are read from memory; False where that is not known."""
    reads = median(card.at["memory_utilization"] for card in cards_of(samples))
    return reads is not None and reads <= threshold("spinning_memory")


def _all_busy(samples: Sequence[Sample]) -> bool:
    known = [sample.utilization for sample in samples if sample.utilization is not None]
    return len(known) >= 3 and (median(known) or 0) >= threshold("busy")


def _thermal(load: Load) -> _Said:
    share = load.share(lambda card: card.heated)
    odd = _odd(load)
    if share < threshold("capped") and not any(card.heated for card in odd):
        return None
    hot = [card for card in load.cards if card.heated]
    text = f"{_gpus(hot, load)} at {_text(median(card.at['temperature'] for card in hot), '°C')}, {_clocks(hot)}"
    return text, _some(("samples held by heat", _percent(median(card.heat for card in hot)), "%"))


def _slow_rank(load: Load) -> _Said:
    odd = _odd(load)
    limited = load.share(lambda card: card.limited)
    common = threshold("capped") <= limited < 1 and all(card.limited for card in odd)
    if not odd or common or load.share(lambda card: card.heated) >= threshold("capped"):
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
        mine, theirs = median(map(value, odd)), median(map(value, rest))
        if mine is None or theirs is None or abs(mine - theirs) <= 0.1 * max(abs(mine), abs(theirs)):
            continue
        parts.append(f"{what} {mine:.0f} instead of {theirs:.0f} {unit}")
        figures += [Figure(f"{what}, odd", mine, unit), Figure(f"{what}, others", theirs, unit)]
    return f"{_gpus(odd, load)}: {', '.join(parts) or 'differs'}", tuple(figures)


def _odd(load: Load) -> list[Card]:
    """The minority of the GPUs that differs from the others."""
    cards = load.cards
    if len(cards) < 2:
        return []
    odd = [card for card in cards if _differs(card, cards, both=True)]
    if len(odd) > threshold("odd_share") * len(cards) or len(cards) == 2:
        odd = [card for card in cards if _differs(card, cards, both=False)]
    return odd if len(odd) <= threshold("odd_share") * len(cards) else []


def _differs(card: Card, cards: Sequence[Card], both: bool) -> bool:
    """both: whether more than the others counts as well as less."""
    others = [other for other in cards if other is not card]

    def usual(field: str) -> float | None:
        return median(other.at[field] for other in others)

    clock = ratio(card.at["sm_clock"], usual("sm_clock"))
    power = ratio(card.at["power"], usual("power"))
    mine, theirs = card.at["utilization"], usual("utilization")
    behind = (theirs - mine) if mine is not None and theirs is not None else 0.0
    apart = threshold("odd_power")
    lanes = median(other.link for other in others)
    link = ratio(card.link, lanes)
    full = card.transfer is None or card.transfer >= threshold("transfer") * (card.link or 0)
    narrow = link is not None and link < (threshold("odd_link") if full else threshold("odd_link_idle"))
    return (
        (clock is not None and clock < threshold("odd_clock"))
        or (power is not None and (power < 1 - apart or (both and power > 1 + apart)))
        or (abs(behind) if both else behind) >= threshold("odd_utilization")
        or (card.heated and not any(other.heated for other in others))
        or narrow
    )


def _power_cap(load: Load) -> _Said:
    held = [card for card in load.cards if card.limited]
    if load.share(lambda card: card.heated) >= threshold("capped") or len(held) / len(load.cards) < threshold("capped"):
        return None
    share = median(card.held for card in held)
    if load.waits and share is not None and share < 0.5:
        return None  # most of the time it waits, and meets its limit in between
    own = f", below the card's own {_lowered(load):.0f} W" if _lowered(load) else ""
    brakes = ", by a power brake" if _braked(load) else ", by a slowdown of the hardware" if _slowed(load) else ""
    text = f"{_gpus(held, load)} at {_watts(load, held)}{own}, {_clocks(held)}{brakes}"
    return text, _some(("samples held by power", _percent(share), "%"))


def _lowered(load: Load) -> float | None:
    """The card's own power limit, where the enforced one is lower."""
    limit, own = load.at("power_limit"), load.over(lambda card: card.sku.get("power_limit"))
    return own if limit and own and limit < 0.95 * own else None


def _braked(load: Load) -> bool:
    return any(sample.reasons and sample.reasons & 0x80 for sample in load.samples)


def _slowed(load: Load) -> bool:
    """Whether the hardware gives its slowdown as the reason and no limit of power beside it."""
    known = [sample.reasons for sample in load.samples if sample.reasons]
    return any(mask & SLOWDOWN for mask in known) and not any(mask & NO_POWER for mask in known)


def _clocks_down(load: Load) -> _Said:
    if load.share(lambda card: card.heated or card.limited) >= threshold("capped") or not load.works:
        return None
    odd = _odd(load)  # which are a finding of their own
    alike = [card for card in load.cards if card not in odd]
    parts = []
    for what, share, field in (
        ("SM", median(card.clock for card in alike), "sm_clock"),
        ("memory", median(card.memory_clock for card in alike), "memory_clock"),
    ):
        if share and share < threshold("clocks"):
            now, top = (median(card.at[name] for card in alike) for name in (field, f"{field}_max"))
            parts.append(f"{what} clock {now:.0f} of {top:.0f} MHz")
    if not parts:
        return None
    set_by_hand = [sample for sample in load.samples if sample.reasons is not None and sample.reasons & 0x102]
    unknown = all(sample.reasons is None for sample in load.samples)
    why = " (application clocks are set)" if set_by_hand else " (reasons are not known)" if unknown else ""
    return f"{', '.join(parts)} at {_text(load.at('utilization'), '%')} utilisation, {_watts(load)}{why}", ()


def _transfer(load: Load) -> _Said:
    rate, link = load.over(lambda card: card.transfer), load.over(lambda card: card.link)
    if rate is None or rate < (threshold("transfer") * link if link else threshold("transfer_rate")):
        return None
    of = f" of {link:.0f}" if link else ""
    return f"{rate:.0f}{of} MB/s in one direction at {_text(load.at('utilization'), '%')} utilisation", ()


def _memory(load: Load) -> _Said:
    usage, queued = load.counted("token_usage"), load.counted("queued")
    if usage is not None and usage >= threshold("full") and (queued is None or queued > 0):
        text = f"{100 * usage:.0f} % of its tokens used" + (f", {queued:.0f} requests wait" if queued else "")
        return text, _some(("KV cache used", 100 * usage, "%"), ("queued requests", queued, ""))
    run = load.run
    # Without the server's counters: what mostly decodes, and yet waits long for its first token, stood in the queue.
    each = ratio(run.output_tokens, run.completed)
    whole = run.e2e or (run.ttft + run.itl * each if run.ttft and run.itl and each else None)
    first = ratio(run.ttft, whole)
    decodes = run.input_tokens and run.output_tokens and run.input_tokens <= 4 * run.output_tokens
    if usage is None and queued is None and decodes and first and first >= threshold("waiting") and load.busy:
        text = f"{100 * first:.0f} % of a request's time passes before its first token, so it waits in the queue"
        return text, _some(("time of a request", whole, "ms"))
    return None


def _host(load: Load) -> _Said:
    mean = load.over(lambda card: card.mean)
    level = load.at("utilization") or 0
    if mean is None or load.busy:
        return None
    if not load.waits and (load.over(lambda card: card.power) or 0) >= threshold("unloaded"):
        return None
    # With so little of it, what tokens came are not these GPUs'.
    if mean < threshold("active") / (2 if load.tokens else 1):
        return None
    gaps = load.over(lambda card: card.gaps) or 0
    running = load.counted("running")
    few = running is not None and load.concurrency and running < 0.5 * load.concurrency
    why = f", {running:.0f} of {load.concurrency:.0f} requests running: the client sends too little" if few else ""
    text = f"utilisation {mean:.0f} % on average, {100 * gaps:.0f} % of the samples below {threshold('gap'):.0f} %{why}"
    return text, _some(("mean utilisation", mean, "%"), ("median utilisation", level, "%"), ("gaps", 100 * gaps, "%"))


def _sound(load: Load) -> bool:
    """At work with clocks that nothing holds down, no full link and no full cache: what is left is the work itself."""
    clock = load.over(lambda card: card.clock)
    held = load.share(lambda card: card.heated or card.limited) >= threshold("capped")
    return load.works and not held and (clock is None or clock >= threshold("clocks")) and load.tokens != 0


def _unloaded(load: Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not load.busy or not _sound(load) or power is None or power >= threshold("unloaded") or _normal(load):
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


def _decode(load: Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not load.busy or not _sound(load) or power is None or power >= threshold("unloaded") or not _normal(load):
        return None
    slow, step = _slowness(load)
    because = (
        f"a step takes {slow:.1f} times as long as reading the whole memory once"
        if slow and slow >= threshold("step_least")
        else "usual for this GPU"
    )
    text = f"{_watts(load)}, {because}" + (f"; {_rate(load)}" if load.tokens else "")
    return text, _some(("a decode step", step, "ms"))


def _normal(load: Load) -> bool:
    """Whether little power is what decoding takes on this GPU.

    With a rate: a step that takes not much longer than reading the memory once is limited by its bandwidth, unless
    memory is seen to rest. Without, or where a step cannot have read it: only in a phase of decoding, in the range that
    was seen on such a card. Never where the known-good did better.
    """
    reads = load.at("memory_utilization")
    if load.kind == "prefill" or _fell_behind(load) or (reads is not None and reads < threshold("idle_memory")):
        return False
    slow, _ = _slowness(load)
    if slow is not None and slow >= threshold("step_least"):
        return slow <= threshold("step")
    power = load.over(lambda card: card.power)
    band = _decode_power(load)
    return load.kind == "decode" and band is not None and power is not None and band[0] <= power <= band[1]


def _fell_behind(load: Load) -> bool:
    return bool(load.before and load.tokens is not None and load.tokens < threshold("slower") * load.before)


def _decode_power(load: Load) -> tuple[float, float] | None:
    """The shares of the power limit between which such a card was seen to decode soundly, where that is known."""
    return next((tuple(card.sku["decode_power"]) for card in load.cards if "decode_power" in card.sku), None)


def _slowness(load: Load) -> tuple[float | None, float | None]:
    """How many times longer a decode step takes than reading the GPU's memory once; and the step in ms."""
    run = load.run
    by_rate = ratio(run.concurrency or load.concurrency, load.tokens)
    steps = [1000 * by_rate * (run.accept_length or 1)] if by_rate else []
    steps += [run.itl] if run.itl and not run.accept_length else []
    reads = load.over(lambda card: ratio(card.at["memory_used"] or card.sku.get("memory"), card.sku.get("bandwidth")))
    if not steps:
        return None, None
    return (min(steps) / (reads * 1.048576) if reads else None), min(steps)


def _loaded(load: Load) -> _Said:
    power = load.over(lambda card: card.power)
    if not _sound(load) or power is None or power < threshold("unloaded"):
        return None
    return f"{_text(load.at('utilization'), '%')} utilisation at {_watts(load)}, {_clocks(load.cards)}", ()


_RULES: dict[str, Callable[[Load], _Said]] = {
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


def _otherwise(load: Load) -> Finding:
    """No rule holds: because nothing happened, or because too little is known."""
    level, mean = load.at("utilization"), load.over(lambda card: card.mean)
    own_limit = load.over(lambda card: card.sku.get("power_limit"))
    missing = [
        field
        for field in ("utilization", *HARDWARE)
        if load.at(field) is None and not (field == "power_limit" and own_limit)
    ]
    if mean is not None and mean < threshold("active"):
        return _finding("idle", f"utilisation {mean:.0f} % on average, {_watts(load)}", _figures(load), load.phase)
    names = {"utilization": "utilisation", "sm_clock": "SM clock", "sm_clock_max": "the SM clock's maximum"}
    lacks = ", ".join(names.get(field, field.replace("_", " ")) for field in missing)
    seen = f"{level:.0f} % utilisation" if level is not None else "utilisation not known"
    return _finding("unknown", f"{seen}; missing: {lacks or 'nothing'}", _figures(load), load.phase)


# In words.


def _figures(load: Load) -> tuple[Figure, ...]:
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


def _narrowest(load: Load) -> float | None:
    """What the narrowest PCIe link carries, where it is not what the others do."""
    links = sorted(card.link for card in load.cards if card.link)
    return links[0] if links and links[0] < threshold("odd_link") * statistics.median(links) else None


def _missed(load: Load) -> float | None:
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


def _watts(load: Load, cards: Sequence[Card] = ()) -> str:
    power = median(card.at["power"] for card in cards or load.cards)
    share = median(card.power for card in cards or load.cards)
    if power is None:
        return "power not known"
    return f"{power:.0f} of {power / share:.0f} W ({100 * share:.0f} %)" if share else f"{power:.0f} W"


def _clocks(cards: Sequence[Card]) -> str:
    now, top = median(card.at["sm_clock"] for card in cards), median(card.at["sm_clock_max"] for card in cards)
    if now is None:
        return "clocks not known"
    return f"SM clock {now:.0f} of {top:.0f} MHz" if top else f"SM clock {now:.0f} MHz"


def _gpus(cards: Sequence[Card], load: Load) -> str:
    if len(cards) == len(load.cards):
        return "all GPUs" if len(cards) > 1 else f"GPU {cards[0].gpu}"
    named = ", ".join(sorted((card.gpu for card in cards), key=lambda gpu: (len(gpu), gpu)))
    return f"GPU {named} of {len(load.cards)}" if len(cards) == 1 else f"GPUs {named} of {len(load.cards)}"


def _rate(load: Load) -> str:
    at = f" at {load.concurrency:.0f} requests" if load.concurrency else ""
    return f"{load.tokens or 0:.4g} tokens/s{at}"
