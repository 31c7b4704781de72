"""Charts as inline SVG: pure functions from numbers to markup. Every text is escaped; colours are the page's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from markupsafe import Markup

from kernelswap.report.data import Phase, Range, Sample

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


def against_concurrency(title: str, unit: str, series: Sequence[Series]) -> Markup:
    """Medians as lines, their spread as bars; "" if there is nothing to draw."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return EMPTY
    width, height, left, right, top, bottom = 480.0, 250.0, 54.0, 12.0, 30.0, 36.0
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
                Markup('<circle cx="{}" cy="{}" r="3.5" class="{}"><title>{}</title></circle>').format(
                    _n(x), _n(down(point.median)), line.style, says
                )
            )
    return svg(width, height, f"{title} against concurrency", *parts)


@dataclass(frozen=True)
class Panel:
    """One measure of all GPUs over time. full: the Sample's field that is its upper bound, drawn dashed."""

    title: str
    unit: str
    field: str
    full: str = ""
    top: float | None = None
    scale: float = 1.0


PANELS = (
    Panel("Utilisation", "%", "utilization", top=100),
    Panel("Power", "W", "power", full="power_limit"),
    Panel("SM clock", "MHz", "sm_clock", full="sm_clock_max"),
    Panel("Memory used", "GiB", "memory_used", full="memory_total", scale=1 / 1024),
    Panel("Temperature", "°C", "temperature"),
)
WIDTH, LEFT, RIGHT, BAND, LANE = 1120.0, 60.0, 92.0, 34.0, 96.0


def timeline(samples: Sequence[Sample], phases: Sequence[Phase], origin: float) -> Markup:
    """All GPUs over time, a panel for each measure: the median, the range of all, and each GPU that stands out.

    origin: epoch seconds that count as 0, the start of the swap.
    """
    panels = [panel for panel in PANELS if any(getattr(sample, panel.field) is not None for sample in samples)]
    if not panels:
        return EMPTY
    start, end = samples[0].at, max(sample.at for sample in samples)
    room = WIDTH - LEFT - RIGHT
    height = BAND + LANE * len(panels) + 24

    def across(at: float) -> float:
        return LEFT + room * (at - start) / ((end - start) or 1.0)

    parts = list(_bands(phases, across, height - 24))
    for i, panel in enumerate(panels):
        parts += _lane(panel, samples, BAND + LANE * i, across)
    marks = [mark for mark in ticks(end - start, 8) if mark <= end - start]
    parts += [_text(across(start + mark), height - 8, f"{start + mark - origin:.0f} s", "middle") for mark in marks]
    return svg(WIDTH, height, "GPUs over time, from the start of the swap", *parts)


def _bands(phases: Sequence[Phase], across: Callable[[float], float], bottom: float) -> Iterator[Markup]:
    """The phases behind the panels; repetitions share a label."""
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


def _lane(panel: Panel, samples: Sequence[Sample], top: float, across: Callable[[float], float]) -> Iterator[Markup]:
    bottom, high = top + LANE - 14, top + 8
    lines = {gpu: _thinned(points) for gpu, points in _by_gpu(samples, panel.field, panel.scale).items()}
    limits = [value * panel.scale for s in samples if (value := getattr(s, panel.full, None)) is not None]
    limit = max(limits, default=None)
    reached = max(value for points in lines.values() for _, value in points)
    scale = ticks(panel.top or max(reached, limit or 0.0), 2)
    peak = panel.top or max(scale[-1] if limit is None else limit, reached) * 1.04

    def down(value: float) -> float:
        return bottom - (bottom - high) * min(1.0, value / (peak or 1.0))

    yield _text(LEFT, high - 6, f"{panel.title}, {panel.unit}", "small strong")
    yield from _grid([(down(value), _short(value)) for value in scale if value <= peak], LEFT, WIDTH - RIGHT)
    if limit is not None:
        yield Markup('<path d="M{} {}H{}" class="limit"/>').format(_n(LEFT), _n(down(limit)), _n(WIDTH - RIGHT))
        yield _text(WIDTH - RIGHT + 6, down(limit) + 4, f"limit {_short(limit)}", "small faint")
    middle = list(_across_gpus(lines))
    if len(lines) > 1:
        area = [(across(at), down(most)) for at, _, _, most in middle]
        area += [(across(at), down(least)) for at, least, _, _ in reversed(middle)]
        yield Markup('<path d="{}Z" class="range"/>').format(_line(area))
    for part in _unbroken([(at, value) for at, _, value, _ in middle]):
        yield _path([(across(at), down(value)) for at, value in part], "median")
    taken: list[float] = []
    for gpu in outliers(lines, peak):
        for part in _unbroken(lines[gpu]):
            yield _path([(across(at), down(value)) for at, value in part], "outlier")
        y = down(fmean(value for _, value in lines[gpu])) + 4
        while any(abs(y - other) < 12 for other in taken):
            y += 12
        taken.append(y)
        yield _text(WIDTH - RIGHT + 6, y, f"GPU {gpu}", "small bad")


Line = list[tuple[float, float]]


def _by_gpu(samples: Iterable[Sample], field: str, scale: float) -> dict[str, Line]:
    lines: dict[str, Line] = {}
    for sample in samples:
        value = getattr(sample, field)
        if value is not None:
            lines.setdefault(sample.gpu, []).append((sample.at, value * scale))
    return lines


def _thinned(points: Line) -> Line:
    """At most POINTS, each the mean of those it stands for."""
    size = math.ceil(len(points) / POINTS)
    parts = (points[i : i + size] for i in range(0, len(points), size))
    return [(fmean(at for at, _ in part), fmean(value for _, value in part)) for part in parts]


def _across_gpus(lines: Mapping[str, Line]) -> Iterator[tuple[float, float, float, float]]:
    """Time, least, median and most of all GPUs; their samples of one moment have the same place in their lines."""
    for together in zip(*lines.values(), strict=False):
        values = [value for _, value in together]
        yield together[0][0], min(values), median(values), max(values)


def _unbroken(points: Sequence[tuple[float, float]]) -> Iterator[Line]:
    """A line is broken where several samples in a row are missing."""
    gaps = [b[0] - a[0] for a, b in zip(points, points[1:], strict=False)]
    usual = median(gaps) if gaps else 0.0
    part: Line = []
    for point, gap in zip(points, [0.0, *gaps], strict=True):
        if gap > 5 * usual and part:
            yield part
            part = []
        part.append(point)
    if part:
        yield part


def outliers(lines: Mapping[str, Line], peak: float) -> list[str]:
    """GPUs whose mean is further than a tenth of the scale from that of the others."""
    means = {gpu: fmean(value for _, value in points) for gpu, points in lines.items()}
    if len(means) < 3:
        return list(means) if len(means) == 2 and max(means.values()) - min(means.values()) > 0.1 * peak else []
    usual = median(means.values())
    return [gpu for gpu, mean in means.items() if abs(mean - usual) > 0.1 * peak]


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
        _n(x), _n(low), _n(high), _n(x - 4), _n(x + 4), style
    )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"
