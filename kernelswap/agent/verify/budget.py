"""How long the verification of a swap will take, told before it begins: by the last swap's steps, else by the rates."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from kernelswap.measured import ThroughputResult
from kernelswap.protocol import Report, Throughput

STEPS = ("baseline", "smoke", "drift", "accuracy", "throughput", "soak")
IMPORT = 8.0  # seconds until the benchmark is imported. Source: SGLang 0.5.23, 3.6 to 8.4 s measured
BETWEEN = 2.0  # seconds of each run before its first request: the benchmark waits one, and reads its tokenizer


def last(history: Sequence[Report], verify: str) -> Dict[str, float]:
    """Seconds of each verifying step when it last went well, in a swap that was verified in the same way."""
    found: Dict[str, float] = {}
    for report in history:
        if report.request.verify == verify:
            found.update({step.name: step.seconds for step in report.steps if step.ok and step.name in STEPS})
    return found


def runs(wanted: Throughput, known: Optional[ThroughputResult]) -> Optional[float]:
    """Seconds of the first look's runs, by what the known-good did, else by the floors, which is the longest that they
    may take. None if neither says."""
    rates = {point.concurrency: point.median for point in known.points} if known else {}
    seconds = IMPORT + BETWEEN
    for concurrency in wanted.ladder:
        # Fewer requests at once are each served no slower.
        least = wanted.floor_at(concurrency) or (wanted.floor or 0) * concurrency / wanted.concurrency
        rate = rates.get(concurrency) or least
        if not rate:
            return None
        tokens = wanted.requests_at(concurrency) * wanted.output_tokens
        seconds += wanted.repetitions * (BETWEEN + tokens / rate)
    return seconds


def text(
    steps: Sequence[str], wanted: Optional[Throughput], known: Optional[ThroughputResult], before: Dict[str, float]
) -> str:
    """Of the steps that there will be. before: how long each last took."""
    parts: List[Tuple[str, Optional[float]]] = []
    most = False
    for name in steps:
        seconds, label = before.get(name), name
        if name in ("baseline", "throughput") and wanted:
            label = f"{name} {len(wanted.ladder)} x {wanted.repetitions} runs"
            seconds = before.get(name, before.get("throughput"))
            if known or seconds is None:  # a last one that was not clear at once took more
                seconds = runs(wanted, known)
                most = most or not (known or seconds is None)
        parts.append((label, seconds))
    said = ", ".join(f"{label} {'?' if seconds is None else f'{seconds:.0f}'}" for label, seconds in parts)
    total = sum(seconds or 0 for _, seconds in parts)
    if not total:
        return f"verification, how long is not known yet: {', '.join(label for label, _ in parts)}"
    unknown = any(seconds is None for _, seconds in parts)
    about = ("up to" if most else "about") + f" {total:.0f} s" + (" and what is not known yet" if unknown else "")
    return f"verification: {about}: {said}"
