"""Whether a measured server is fast enough: above its floors, and no slower than the known-good beyond what is allowed.

Runs are few and noisy, and one of them may be far off. So two servers differ by the Hodges-Lehmann shift, the median
over all pairs of runs, which uses nearly all of the data and lets one odd run move it little; and the margin is
Student's t for the pooled spread of both. Rates are compared by their logarithms, as noise is a share of them.

A look that cannot tell is followed by more runs, and each look may err: so the first must be surer than the last. Fewer
than 1 of 100 servers that are as fast as the known-good are rejected, and at least 95 of 100 that are 15 % slower are,
at 3 repetitions, 5 % allowed and a noise of 5 % of each run. With a noise of 20 % most are inconclusive, and fewer than
2 of 100 equal ones are rejected (tests/agent/verify/test_gates.py).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Optional, Sequence

from kernelswap.measured import Point, Run, ThroughputResult, ThroughputVerdict
from kernelswap.protocol import Throughput

SLOWER = (0.99, 0.95, 0.90)  # how sure each look must be that it is too slow
ENOUGH = 0.90  # how sure that it is fast enough: to be wrong here costs less than a rejection
# What is allowed hides the looks' errors only where the noise of a run is of its size. Where it is above NOISY, it must
# also be this sure that the candidate is slower at all.
NOISY = 0.12
PAST_DOUBT = 0.998
LOOKS = len(SLOWER)
# Where so much more of the host's CPU goes elsewhere than before, slower proves nothing, up to so many times that.
# Own choice: a tenth of two cores took a fifth of the lab's tokens.
BUSIER, EXPLAINS = 0.05, 3
LEAST_NOISE = 0.01  # share of a rate: three runs that happen to agree prove no less


@dataclass(frozen=True)
class Comparison:
    """One concurrency of both. shift, margin: shares of the known-good's rate, + is faster. verdict: pass, fail or ""
    for unclear."""

    concurrency: int
    shift: float
    margin: float
    verdict: str


def judge(
    wanted: Throughput, candidate: ThroughputResult, known: Optional[ThroughputResult], look: int = LOOKS
) -> ThroughputVerdict:
    """The verdict at a look, 1 to LOOKS: inconclusive before the last one asks for more runs."""
    for point in candidate.points:
        floor = wanted.floor_at(point.concurrency)
        if floor is not None and point.median < floor:
            why = f"{point.median:.1f} output tok/s at {point.concurrency} concurrent requests, the floor is {floor:g}"
            return ThroughputVerdict("fail", why, candidate, known, floor=floor, concurrency=point.concurrency)
    floors = wanted.floor is not None or bool(wanted.floors)
    if known is None or wanted.regression is None:
        why = "no slower than its floor" if floors else "measured"
        return ThroughputVerdict("pass" if floors else "recorded", why, candidate, known, floor=wanted.floor)
    pairs = [(mine, theirs) for mine in candidate.points for theirs in known.points if _same(mine, theirs)]
    found = [compare(mine, theirs, wanted.regression, look, len(pairs)) for mine, theirs in pairs]
    if not found:
        return ThroughputVerdict("recorded", "nothing of the known-good to compare it to", candidate, known)
    order = {"fail": 0, "": 1, "pass": 2}
    worst = min(found, key=lambda item: (order[item.verdict], item.shift))
    side = "slower" if worst.shift < 0 else "faster"
    why = f"{abs(worst.shift):.1%} {side} than {known.release} at {worst.concurrency} concurrent requests"
    why += f" (+- {worst.margin:.1%}), {wanted.regression:.0%} slower is allowed"
    verdict = worst.verdict or "inconclusive"
    if verdict == "fail" and (busier := _busier(candidate, known, worst)):
        verdict, why = "inconclusive", f"{why}; {busier}"
    return ThroughputVerdict(verdict, why, candidate, known, worst.shift, worst.margin, wanted.floor, worst.concurrency)


def compare(mine: Point, theirs: Point, allowed: float, look: int = LOOKS, points: int = 1) -> Comparison:
    """points: how many are compared at this look; each of them may err."""
    ours, known = _logs(mine), _logs(theirs)
    shift = _shift(ours, known)
    freedom = len(ours) + len(known) - 2
    if freedom < 2:
        return Comparison(mine.concurrency, math.exp(shift) - 1, 1.0, "")  # nothing says how noisy they are
    noise = max(LEAST_NOISE, math.sqrt((_squares(ours) + _squares(known)) / freedom))
    error = noise * math.sqrt(1 / len(ours) + 1 / len(known))
    limit = math.log(1 - allowed)
    surely_slower = quantile(1 - (1 - SLOWER[min(look, LOOKS) - 1]) / points, freedom) * error
    surely_enough = quantile(ENOUGH, freedom) * error
    doubtless = noise <= NOISY or shift + quantile(PAST_DOUBT, freedom) * error < 0
    verdict = "pass" if shift - surely_enough >= limit else ""
    if doubtless and shift + surely_slower < limit:
        verdict = "fail"
    margin = surely_slower if shift < limit else surely_enough
    return Comparison(mine.concurrency, math.exp(shift) - 1, 1 - math.exp(-margin), verdict)


def difference(mine: Point, theirs: Point) -> float:
    """Share by which a rate is above (+) or below (-) another: the shift."""
    return math.exp(_shift(_logs(mine), _logs(theirs))) - 1


def _shift(ours: Sequence[float], known: Sequence[float]) -> float:
    return statistics.median(a - b for a in ours for b in known)


def point(concurrency: int, runs: Sequence[Run]) -> Point:
    """The runs at one concurrency, together."""
    rates = [run.output_tok_s for run in runs]
    middle, low, high = statistics.median(rates), min(rates), max(rates)
    return Point(concurrency, tuple(runs), middle, low, high, (high - low) / middle if middle else 0.0)


def _busier(candidate: ThroughputResult, known: ThroughputResult, found: Comparison) -> str:
    """What other work the host had beside the candidate that it had not beside the known-good, where that may explain
    the difference; else ""."""
    now, before = (_elsewhere(result, found.concurrency) for result in (candidate, known))
    if now is None or before is None or now - before < max(BUSIER, -found.shift / EXPLAINS):
        return ""
    return f"other work had {now:.0%} of the host's CPU, and {before:.0%} when {known.release} was measured"


def _elsewhere(result: ThroughputResult, concurrency: int) -> Optional[float]:
    runs = [run for point in result.points if point.concurrency == concurrency for run in point.runs]
    shares = [run.elsewhere for run in runs if run.elsewhere is not None]
    return statistics.fmean(shares) if shares else None


def _same(mine: Point, theirs: Point) -> bool:
    return mine.concurrency == theirs.concurrency and bool(mine.runs) and bool(theirs.runs)


def _logs(point: Point) -> Sequence[float]:
    return [math.log(max(run.output_tok_s, 1e-9)) for run in point.runs]


def _squares(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return sum((value - mean) ** 2 for value in values)


def quantile(p: float, freedom: int) -> float:
    """Of Student's t. Source: Abramowitz and Stegun, 26.7.5; at most 2 % off from 4 degrees of freedom on, for p up to
    0.995."""
    z = statistics.NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
