"""Charts as inline SVG: pure functions from numbers to markup. All text is escaped; colours are the page's classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean, median

from markupsafe import Markup

from kernelswap.report.data import Phase, Range
from kernelswap.traces import Sample, ServerSample

POINTS = 300  # along a timeline; a screen shows no more
EMPTY = Markup("")


def svg(width: float, height: float, label: str, *parts: Markup) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _n(width), _n(height), label, EMPTY.join(parts)
    )


def ticks(highest: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 to at or above `highest`."""
    if highest <= 0 or not math.isfinite(highest):
        return [0.0, 1.0]
    rough = highest / wanted
    size = 10 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


@dataclass(frozen=True)
class Series:
    """A line over concurrencies. style: CSS classes of its stroke."""

    name: str
    style: str
    points: Mapping[int, Range]


def against_concurrency(title: str, unit: str, series: Sequence[Series], width: float = 480) -> Markup:
    """Medians as lines, their spread as bars; "" if there is nothing to draw."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return EMPTY
    height, left, right, top, bottom = 250.0, 54.0, 12.0, 30.0, 36.0
    marks = sorted({concurrency for line in drawn for concurrency in line.points})
    scale = ticks(max(point.high for line in drawn for point in line.points.values()))
    room = (width - left - right) / len(marks)
    across = {mark: left + room * (i + 0.5) for i, mark in enumerate(marks)}

    def down(value: float) -> float:
        return top + (height - top - bottom) * (1 - value / scale[-1])

    parts = [_text(left - 44, 16, f"{title}, {unit}", "title")]
    parts += _grid([(down(value), _short(value)) for value in scale], left, width - right)
    parts += [_text(x, height - bottom + 16, str(mark), "middle") for mark, x in across.items()]
    parts.append(_text(left + (width - left - right) / 2, height - 4, "concurrent requests", "middle faint"))
    for i, line in enumerate(drawn):
        shift = (i - (len(drawn) - 1) / 2) * min(7.0, room / 8)
        places = [(across[mark] + shift, point) for mark, point in sorted(line.points.items())]
        parts.append(_path([(x, down(point.median)) for x, point in places], line.style))
        for (x, point), mark in zip(places, sorted(line.points), strict=True):
            parts.append(_whisker(x, down(point.low), down(point.high), line.style) if point.runs > 1 else EMPTY)
            says = f"{line.name}, {mark} concurrent: {_short(point.median)} {unit}"
            says += f" ({_short(point.low)} to {_short(point.high)})" if point.runs > 1 else ""
            parts.append(
                Markup('<circle cx="{}" cy="{}" r="3" class="{}"><title>{}</title></circle>').format(
                    _n(x), _n(down(point.median)), line.style, says
                )
            )
    return svg(width, height, f"{title} against concurrency", *parts)


@dataclass(frozen=True)
class Panel:
    """One measure over time. full: the field that is its upper bound, drawn dashed and called `bound`."""

    title: str
    unit: str
    field: str
    full: str = ""
    bound: str = ""
    top: float | None = None
    scale: float = 1.0


GPU_PANELS = (
    Panel("Utilisation", "%", "utilization", top=100),
    Panel("Power", "W", "power", "power_limit", "limit"),
    Panel("SM clock", "MHz", "sm_clock", "sm_clock_max", "highest"),
    Panel("Memory used", "GiB", "memory_used", "memory_total", "all", scale=1 / 1024),
    Panel("Temperature", "°C", "temperature"),
)
SERVER_PANELS = (
    Panel("SGLang: running requests", "", "running"),
    Panel("SGLang: queued requests", "", "queued"),
    Panel("SGLang: KV cache used", "%", "token_usage", top=100, scale=100),
)
WIDTH, LEFT, RIGHT, BAND, LANE, FOOT = 1120.0, 60.0, 96.0, 34.0, 92.0, 24.0


def timeline(
    samples: Sequence[Sample], server: Sequence[ServerSample], phases: Sequence[Phase], origin: float
) -> Markup:
    """GPUs and the server over time, a panel for each measure: of all GPUs the median, their range, and each that
    stands out.

    origin: epoch seconds that count as 0, the start of the swap.
    """
    moments = sorted({sample.time for sample in samples} | {sample.time for sample in server})
    if not moments:
        return EMPTY
    times = Times(moments[0], moments[-1], min(POINTS, len(moments)), origin)
    panels = [(panel, _lines(panel, samples, times)) for panel in GPU_PANELS]
    panels += [(panel, _lines(panel, server, times)) for panel in SERVER_PANELS]
    panels = [(panel, lines) for panel, lines in panels if lines]
    height = BAND + LANE * len(panels) + FOOT
    parts = list(_bands(phases, times, height - FOOT))
    for i, (panel, lines) in enumerate(panels):
        limits = [value for sample in samples if (value := getattr(sample, panel.full, None)) is not None]
        limit = max(limits) * panel.scale if limits else None
        parts += _lane(panel, lines, limit, BAND + LANE * i, times)
    parts += [_text(times.across(at), height - 6, f"{at - origin:,.0f} s", "middle") for at in times.marks()]
    return svg(WIDTH, height, "GPUs and the server over time, from the start of the swap", *parts)


@dataclass(frozen=True)
class Times:
    """The horizontal axis: from start to end (epoch seconds) in so many bins, labelled from `origin` on."""

    start: float
    end: float
    bins: int
    origin: float

    def across(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - self.start) / ((self.end - self.start) or 1.0)

    def bin(self, at: float) -> int:
        return min(self.bins - 1, int((at - self.start) / ((self.end - self.start) or 1.0) * self.bins))

    def middle(self, place: int) -> float:
        return self.start + (place + 0.5) * (self.end - self.start) / self.bins

    def marks(self) -> list[float]:
        step = ticks((self.end - self.start) or 1.0, 8)[1]
        first = math.ceil((self.start - self.origin) / step)
        marks = [self.origin + step * i for i in range(first, first + 12)]
        return [at for at in marks if at <= self.end]


def _bands(phases: Sequence[Phase], times: Times, bottom: float) -> Iterator[Markup]:
    """The phases behind the panels; repetitions share a label."""
    across = times.across
    for phase in phases:
        x, width = across(phase.start), across(phase.end) - across(phase.start)
        yield Markup('<rect x="{}" y="{}" width="{}" height="{}" class="phase {}"><title>{}</title></rect>').format(
            _n(x), _n(BAND - 16), _n(max(0.0, width)), _n(bottom - BAND + 16), phase_kind(phase.name), _says(phase)
        )
    for name, group in groupby(phases, key=lambda phase: repeated(phase.name)):
        parts = list(group)
        x, width = across(parts[0].start), across(parts[-1].end) - across(parts[0].start)
        if name and width > 6.2 * len(short_phase(name)) + 4:
            yield _text(x + width / 2, BAND - 20, short_phase(name), "middle small")


def _says(phase: Phase) -> str:
    return f"{phase.name or 'between'}: {phase.end - phase.start:.1f} s"


def phase_kind(name: str) -> str:
    """The class of a phase's colour."""
    words = name.split()
    return words[0] if words and words[0] in ("run", "warm-up", "soak") else "other"


def repeated(name: str) -> str:
    """A phase without the count of its repetition: `run c=64 1/3` -> `run c=64`."""
    head, _, count = name.rpartition(" ")
    return head if head and count.replace("/", "").isdigit() and "/" in count else name


def short_phase(name: str) -> str:
    return name.removeprefix("run ")


Line = dict[int, float]  # bin -> value


def _lines(panel: Panel, samples: Sequence[Sample] | Sequence[ServerSample], times: Times) -> dict[str, Line]:
    """For each GPU (the server is "") the mean of each bin in which it was seen."""
    found: dict[str, dict[int, list[float]]] = {}
    for sample in samples:
        value = getattr(sample, panel.field)
        if value is not None:
            line = found.setdefault(getattr(sample, "gpu", ""), {})
            line.setdefault(times.bin(sample.time), []).append(value * panel.scale)
    return {gpu: {place: fmean(values) for place, values in line.items()} for gpu, line in found.items()}


def _lane(panel: Panel, lines: Mapping[str, Line], limit: float | None, top: float, times: Times) -> Iterator[Markup]:
    bottom, high = top + LANE - 12, top + 10
    together = {
        place: values
        for place in range(times.bins)
        if (values := [line[place] for line in lines.values() if place in line])
    }
    reached = max(max(values) for values in together.values())
    peak = panel.top or max(reached, limit or 0.0) or 1.0

    def down(value: float) -> float:
        return bottom - (bottom - high) * min(1.0, value / peak)

    def path(line: Line, style: str) -> Iterator[Markup]:
        for part in _unbroken(line):
            yield _path([(times.across(times.middle(place)), down(line[place])) for place in part], style)

    yield _text(LEFT, high - 6, f"{panel.title}, {panel.unit}".removesuffix(", "), "small strong")
    yield from _grid([(down(value), _short(value)) for value in ticks(peak, 2) if value <= peak], LEFT, WIDTH - RIGHT)
    if limit is not None:
        yield Markup('<path d="M{} {}H{}" class="limit"/>').format(_n(LEFT), _n(down(limit)), _n(WIDTH - RIGHT))
        yield _text(WIDTH - RIGHT + 6, down(limit) + 4, f"{panel.bound} {_short(limit)}", "small faint")
    for part in _unbroken(together) if len(lines) > 1 else ():
        across = [times.across(times.middle(place)) for place in part]
        area = [(x, down(max(together[place]))) for x, place in zip(across, part, strict=True)]
        area += [(x, down(min(together[place]))) for x, place in reversed(list(zip(across, part, strict=True)))]
        yield Markup('<path d="{}Z" class="range"/>').format(_line(area))
    yield from path({place: median(values) for place, values in together.items()}, "typical")
    taken = [] if limit is None else [down(limit) + 4]
    for gpu in outliers(lines, peak):
        yield from path(lines[gpu], "outlier")
        y = down(fmean(lines[gpu].values())) + 4
        while any(abs(y - other) < 12 for other in taken):
            y += 3
        taken.append(y)
        yield _text(WIDTH - RIGHT + 6, y, f"GPU {gpu}"[:14], "small bad")


def _unbroken(line: Mapping[int, object]) -> Iterator[list[int]]:
    """The bins of a line, parted where it has nothing for much longer than is usual."""
    places = sorted(line)
    gaps = [after - before for before, after in pairwise(places)]
    usual = median(gaps) if gaps else 1
    part: list[int] = []
    for place, gap in zip(places, [0, *gaps], strict=True):
        if gap > 5 * usual:
            yield part
            part = []
        part.append(place)
    if part:
        yield part


def outliers(lines: Mapping[str, Line], peak: float) -> list[str]:
    """GPUs whose mean is further than a tenth of the scale from that of the others; of two, both."""
    means = {gpu: fmean(line.values()) for gpu, line in lines.items()}
    usual = median(means.values())
    away = 0.05 if len(means) == 2 else 0.1
    return [gpu for gpu, mean in means.items() if abs(mean - usual) > away * peak]


def _grid(rows: Iterable[tuple[float, str]], left: float, right: float) -> list[Markup]:
    parts = []
    for y, label in rows:
        parts.append(Markup('<path d="M{} {}H{}" class="grid"/>').format(_n(left), _n(y), _n(right)))
        parts.append(_text(left - 6, y + 4, label, "end"))
    return parts


def _text(x: float, y: float, text: str, style: str = "") -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(_n(x), _n(y), style, text)


def _path(points: Sequence[tuple[float, float]], style: str) -> Markup:
    return Markup('<path d="{}" class="line {}"/>').format(_line(points), style) if len(points) > 1 else EMPTY


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)


def _whisker(x: float, low: float, high: float, style: str) -> Markup:
    return Markup('<path d="M{0} {1}V{2}M{3} {1}H{4}M{3} {2}H{4}" class="whisker {5}"/>').format(
        _n(x), _n(low), _n(high), _n(x - 6), _n(x + 6), style
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"
