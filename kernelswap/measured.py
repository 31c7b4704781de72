"""What the verification of a swap measured: kept in its evidence, and with each commit for the next one to compare.

Both the controller and the agent import this module. Rates are tokens per second, times are milliseconds unless said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional, Tuple

THROUGHPUT_FILE = "throughput.json"
DRIFT_FILE = "drift.json"
GPU_FILE = "gpu.csv"  # see traces.GPU_COLUMNS
METRICS_FILE = "metrics.csv"  # SGLang's own counters, see traces.SERVER_COLUMNS
KEPT = (THROUGHPUT_FILE,)  # of the evidence, with each commit
BENCH_FILE = "bench.jsonl"  # the benchmark's own lines, numbers only


@dataclass(frozen=True)
class Run:
    """One run of the benchmark at one concurrency. ttft, itl, e2e: "median", "p90", "p99" -> ms.

    input_tok_s and output_tok_s: prefill and decode over the whole run. cached_tokens: of the prompts, taken from the
    prefix cache; None where the server does not count them.
    """

    concurrency: int
    completed: int
    failed: int
    duration: float
    input_tokens: int
    output_tokens: int
    input_tok_s: float
    output_tok_s: float
    ttft: Dict[str, float]
    itl: Dict[str, float]
    e2e: Dict[str, float]
    cached_tokens: Optional[int] = None


@dataclass(frozen=True)
class Point:
    """The repeated runs at one concurrency. spread: (high - low) / median of output_tok_s."""

    concurrency: int
    runs: Tuple[Run, ...]
    median: float
    low: float
    high: float
    spread: float


@dataclass(frozen=True)
class ThroughputResult:
    """A release measured by one plan. key: digest of plan, engine, model and GPUs; only equal keys are compared.
    points: from the lowest concurrency on."""

    release: str
    key: str
    points: Tuple[Point, ...]


@dataclass(frozen=True)
class ThroughputVerdict:
    """The candidate against its floor and the known-good. verdict: pass, fail, inconclusive, or recorded (no gate).

    difference: share by which the candidate is above (+) or below (-) the known-good at the concurrency that decided,
    see agent/verify/gates.py; margin: the share that noise explains.
    """

    verdict: str
    why: str
    candidate: ThroughputResult
    baseline: Optional[ThroughputResult] = None
    difference: Optional[float] = None
    margin: Optional[float] = None
    floor: Optional[float] = None


@dataclass(frozen=True)
class DriftVerdict:
    """The candidate's greedy answers against those of the known-good. verdict: pass, fail, or recorded.

    equal: share of equal tokens up to the shorter answer; first_divergence: the earliest token that differs; the
    logprob differences are of tokens at equal positions before a divergence, in nats; kl: approximate, over the top k,
    in nats. limits and noise: by the same names.
    """

    verdict: str
    why: str
    release: str
    against: Optional[str] = None
    prompts: int = 0
    tokens: int = 0
    equal: Optional[float] = None
    first_divergence: Optional[int] = None
    mean_logprob: Optional[float] = None
    worst_logprob: Optional[float] = None
    kl: Optional[float] = None
    limits: Optional[Dict[str, float]] = None
    noise: Optional[Dict[str, float]] = None
