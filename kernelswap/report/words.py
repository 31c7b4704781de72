"""A story in words: the verdict in one sentence with its figures, and each figure as people read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernelswap import verdict
from kernelswap.report.data import OUTPUT, Compared, Metric, Range, Story, unreachable

UNKNOWN = "not measured"
OUTCOMES = {
    "committed": "Committed",
    "rolled-back": "Rolled back",
    "down": "DOWN",
    "refused": "Refused",
    "unchanged": "Unchanged",
}
TONES = {"committed": "good", "rolled-back": "bad", "down": "bad", "refused": "warn", "unchanged": "plain"}
BRIEF = ("Output", "TTFT median", "ITL median")  # what people ask for first
SENTENCE = 320  # characters; the whole cause stands below


@dataclass(frozen=True)
class Figure:
    """One of the few numbers that stand beside the verdict. tone: good, bad or ""."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


def outcome(story: Story) -> str:
    word = story.report.outcome
    return OUTCOMES.get(word, word)


def tone(story: Story) -> str:
    return TONES.get(story.report.outcome, "plain")


def sentence(story: Story) -> str:
    """Why it ended so, with the figures that decided."""
    report, cause = story.report, story.report.cause
    what = cause.brief if cause else report.detail
    if report.outcome == "committed":
        same = f"; {story.drift.equal:.1%} of tokens as before" if story.drift and story.drift.equal is not None else ""
        text = f"{_measured(story)}{same}."
        return text[0].upper() + text[1:]
    if report.outcome == "unchanged":
        return f"{report.request.release} served already."
    if report.outcome == "refused":
        return _sentences(what, "Nothing was touched")
    at = f"{report.failed_step} failed: " if report.failed_step else ""
    if report.outcome == "rolled-back":
        return _sentences(at + what, report.detail or f"{report.serving} serves again, verified")
    return _sentences(at + cause.what if cause else "", report.detail)


def _sentences(*parts: str) -> str:
    return " ".join(f"{_cut(part)}." for part in parts if part)


def _cut(text: str) -> str:
    text = text.rstrip(". ")
    return text if len(text) <= SENTENCE else text[: SENTENCE - 1].rstrip() + "…"


def _measured(story: Story) -> str:
    best = decisive(story)
    if best is None or best.after is None:
        numbers = step_numbers(story)
        if "output_tok_s" not in numbers:
            return "it answered right; its throughput was not measured"
        where = f" at concurrency {numbers['concurrency']:g}" if "concurrency" in numbers else ""
        return f"{amount(numbers['output_tok_s'])} output tok/s{where}; the known-good's was not measured"
    text = f"{amount(best.after.median)} output tok/s at concurrency {best.concurrency}"
    if best.change is None:
        return f"{text}; no known-good to compare it with"
    side = "above" if best.change >= 0 else "below"
    verdict = story.throughput
    known = verdict.baseline.release if verdict and verdict.baseline else "the known-good"
    noise = [f"+- {verdict.margin:.1%}"] if verdict and verdict.margin is not None else []
    unclear = ["inconclusive"] if verdict and verdict.verdict == "inconclusive" else []
    more = f" ({', '.join([*noise, *unclear])})" if noise or unclear else ""
    return f"{text}, {abs(best.change):.1%} {side} {known}{more}"


def decisive(story: Story) -> Compared | None:
    """The concurrency that decided, else the highest."""
    rows = {row.concurrency: row for row in story.compared if row.metric == OUTPUT and row.after}
    decided = story.throughput.concurrency if story.throughput else None
    return rows.get(decided) if decided is not None and decided in rows else rows.get(max(rows, default=0))


def step_numbers(story: Story) -> dict[str, float]:
    """What the throughput step itself reported."""
    return next((step.numbers for step in story.report.steps if step.name == "throughput"), {})


def figures(story: Story) -> Iterator[Figure]:
    """What stands beside the verdict; of a swap that did not come so far only its times."""
    best = decisive(story)
    started = any(step.name == "start" for step in story.steps)
    if best:
        yield _compared("Output tok/s", best)
        for name in ("TTFT median", "ITL median"):
            row = _row(story, best.concurrency, name)
            yield _compared(name, row) if row else Figure(name, UNKNOWN)
    elif started:
        numbers = step_numbers(story)
        value = numbers.get("output_tok_s")
        yield Figure("Output tok/s", UNKNOWN if value is None else amount(value))
    if story.drift and story.drift.equal is not None:
        limit = (story.drift.limits or {}).get("equal")
        bad = {"fail": "bad", "pass": "good"}.get(story.drift.verdict, "")
        note = f"limit {limit:.1%}" if limit is not None else f"against {story.drift.against or 'nothing'}"
        yield Figure("Same tokens", f"{story.drift.equal:.1%}", note, bad)
    elif started:
        yield Figure("Same tokens", UNKNOWN)
    away = unreachable(story.steps)
    note = "nothing was stopped" if not started else "" if away is None else f"{duration(away)} not reachable"
    yield Figure("Swap took", duration(story.report.ended - story.report.started), note)


def _row(story: Story, concurrency: int, name: str) -> Compared | None:
    return next((r for r in story.compared if r.concurrency == concurrency and r.metric.name == name), None)


def _compared(label: str, row: Compared) -> Figure:
    value = UNKNOWN if row.after is None else with_unit(row.after.median, row.metric)
    before = f"was {with_unit(row.before.median, row.metric)}" if row.before else "before: not measured"
    note = before if row.change is None else f"{row.change:+.1%}, {before}"
    return Figure(f"{label} at {row.concurrency}", value, note, {"better": "good", "worse": "bad"}.get(row.judged, ""))


def with_unit(value: float, metric: Metric) -> str:
    return amount(value) if metric.unit == "tok/s" else f"{amount(value)} {metric.unit}"


def amount(value: float) -> str:
    """Three or four significant digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 or not size else f"{value:.2g}"


def spread(value: Range | None) -> str:
    """low to high, where there were several runs."""
    return f"{amount(value.low)} to {amount(value.high)}" if value and value.runs > 1 else ""


def half(value: Range) -> str:
    """The figure after a ±: how far the furthest of several runs is from their median."""
    return amount(max(value.high - value.median, value.median - value.low)) if value.runs > 1 else ""


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def what_to_try(story: Story) -> str:
    """Against the cause, and what another try takes."""
    return verdict.what_to_try(story.report)


def next_command(story: Story) -> str:
    """What to type once that is done."""
    return verdict.next_command(story.report)


@dataclass(frozen=True)
class DriftRow:
    """One number of the drift, its limit and the noise. ok: None where there is no limit."""

    name: str
    value: str
    limit: str
    noise: str
    ok: bool | None

    @property
    def judged(self) -> str:
        return "" if self.ok is None else "within" if self.ok else "beyond"


DRIFT = {  # DriftVerdict's field -> name, format, whether a limit is a least
    "equal": ("Equal tokens", ".2%", True),
    "first_divergence": ("First token that differs", "d", True),
    "mean_logprob": ("Mean logprob difference, nats", ".4g", False),
    "worst_prompt": ("Mean logprob difference of the worst prompt, nats", ".4g", False),
    "worst_logprob": ("Worst logprob difference, nats", ".4g", False),
    "kl": ("KL over the top tokens, nats", ".4g", False),
}


def drift_rows(story: Story) -> Iterator[DriftRow]:
    drift = story.drift
    if drift is None:
        return
    for field, (name, style, least) in DRIFT.items():
        value, limit, noise = getattr(drift, field), (drift.limits or {}).get(field), (drift.noise or {}).get(field)
        ok = None if value is None or limit is None else value >= limit if least else value <= limit
        side = "at least" if least else "at most"
        none = "none" if field == "first_divergence" and drift.equal == 1 else UNKNOWN
        yield DriftRow(
            name,
            none if value is None else format(value, style),
            "" if limit is None else f"{side} {limit:{style if style != 'd' else 'g'}}",
            "" if noise is None else f"{noise:{style if style != 'd' else 'g'}}",
            ok,
        )
