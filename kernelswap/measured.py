"""What the verification of a swap measured: kept in its evidence, and with each commit for the next one to compare.

Both the controller and the agent import this module. Rates are tokens per second, times are milliseconds unless said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Dict, Optional, Tuple

THROUGHPUT_FILE = "throughput.json"
DRIFT_FILE = "drift.json"
DRIFT_REFERENCE_FILE = "drift-reference.json"
ACCURACY_FILE = "accuracy.json"
GPU_FILE = "gpu.csv"  # see GPU_COLUMNS
METRICS_FILE = "metrics.csv"  # SGLang's own counters, see SERVER_COLUMNS
SMOKE_FILE = "smoke.json"
INSTALLED_FILE = "installed.json"
KEPT = (SMOKE_FILE, DRIFT_REFERENCE_FILE, ACCURACY_FILE, THROUGHPUT_FILE)  # of the evidence, with each commit
BENCH_FILE = "bench.jsonl"  # the benchmark's own lines, numbers only
BASELINE = "baseline "  # how the phases of the known-good begin, where it was measured before its stop

# The columns of gpu.csv are nvidia-smi's where it has one, so that whoever reads its files reads ours.
GPU_COLUMNS = {
    "time": "time",
    "phase": "phase",
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "utilization": "utilization.gpu [%]",
    "memory_utilization": "utilization.memory [%]",
    "power": "power.draw [W]",
    "power_limit": "enforced.power.limit [W]",
    "sm_clock": "clocks.sm [MHz]",
    "sm_clock_max": "clocks.max.sm [MHz]",
    "memory_clock": "clocks.mem [MHz]",
    "memory_clock_max": "clocks.max.mem [MHz]",
    "reasons": "clocks_event_reasons.active",
    "memory_used": "memory.used [MiB]",
    "memory_total": "memory.total [MiB]",
    "pcie_rx": "pcie.rx [MB/s]",
    "pcie_tx": "pcie.tx [MB/s]",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "temperature": "temperature.gpu",
}
SERVER_COLUMNS = (
    "time", "phase", "running", "queued", "token_usage", "cache_hit_rate", "gen_throughput", "spec_accept_length",
)  # fmt: skip


@dataclass(frozen=True)
class Installed:
    """What a release was verified on. engine: SGLang's version; files: digest of its files and of the packages beside
    it; driver: NVIDIA's; gpus: `UUID name` each. What is not known, or not used, is empty."""

    engine: str = ""
    files: str = ""
    driver: str = ""
    gpus: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of the benchmark at one concurrency. ttft, itl, e2e: "median", "p90", "p99" -> ms.

    input_tok_s and output_tok_s: prefill and decode over the whole run. cached_tokens: of the prompts, taken from the
    prefix cache; None where the server does not count them. elsewhere: share of the host's CPU that neither the server
    nor the benchmark had meanwhile, see agent/verify/elsewhere.py.
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
    elsewhere: Optional[float] = None


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

    concurrency: the one that decided; difference: share by which the candidate is above (+) or below (-) the known-good
    there, see agent/verify/gates.py; margin: the share that noise explains.
    """

    verdict: str
    why: str
    candidate: ThroughputResult
    baseline: Optional[ThroughputResult] = None
    difference: Optional[float] = None
    margin: Optional[float] = None
    floor: Optional[float] = None
    concurrency: Optional[int] = None


@dataclass(frozen=True)
class Scored:
    """The tokens of one prompt and its greedy answer, each with its logprob given all before it, and the top k there.

    given: how many are the prompt's, without its first; 0 where it was not scored. Logprobs are in nats.
    """

    ids: Tuple[int, ...]
    logprobs: Tuple[float, ...]
    top_ids: Tuple[Tuple[int, ...], ...]
    top_logprobs: Tuple[Tuple[float, ...], ...]
    given: int


@dataclass(frozen=True)
class Drift:
    """How far the answers to the same prompts are apart.

    tokens: compared ones, up to and with the first that differs of each answer. equal: share of equal tokens up to the
    shorter answer. first_divergence: the earliest token of an answer that differs; None if none does. mean_logprob,
    worst_prompt, worst_logprob: how much a token's logprob differs, in nats: the mean, that of the worst prompt, and
    the worst of the tokens that the known-good chose. kl: mean over the compared, from the known-good, in nats, with
    all below the top k taken as one token: at most what it would be over all.
    """

    FIGURES: ClassVar[Tuple[str, ...]] = ("equal", "mean_logprob", "worst_prompt", "worst_logprob", "kl")

    tokens: int
    equal: float
    first_divergence: Optional[int]
    mean_logprob: float
    worst_prompt: float
    worst_logprob: float
    kl: float

    @property
    def numbers(self) -> Dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in self.FIGURES}


@dataclass(frozen=True)
class DriftReference:
    """What a committed release answered. model: its folder, links followed; files: digest of its configuration, its
    tokenizer, and the names and sizes of its weights; written: when its weights were, epoch seconds; prompts: digest of
    what was asked; noise: the same server asked a second time, one prompt after the other."""

    release: str
    model: str
    files: str
    written: float
    prompts: str
    samples: Tuple[Scored, ...]
    noise: Drift


@dataclass(frozen=True)
class DriftVerdict:
    """The candidate's greedy answers against those of the known-good. verdict: pass, fail, or recorded.

    against: the release it was compared to. The figures are Drift's; limits and noise: by the same names. noise is the
    known-good's own; own_noise: the candidate's.
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
    worst_prompt: Optional[float] = None
    worst_logprob: Optional[float] = None
    kl: Optional[float] = None
    limits: Optional[Dict[str, float]] = None
    noise: Optional[Dict[str, float]] = None
    own_noise: Optional[Dict[str, float]] = None

    @property
    def numbers(self) -> Dict[str, float]:
        """The figures that there are."""
        values = ((name, getattr(self, name)) for name in Drift.FIGURES)
        return {name: round(value, 6) for name, value in values if value is not None}


@dataclass(frozen=True)
class AccuracyVerdict:
    """Graded questions, `scores` of each run. verdict: pass, fail, or recorded (neither floor nor known-good).

    mean: share of right answers; spread: highest less lowest run. margin: by how much the mean may be below that of
    the release `against`, whose is `baseline`. key: digest of what was asked; only equal keys are compared.
    """

    verdict: str
    why: str
    release: str
    key: str
    scores: Tuple[float, ...]
    mean: float
    spread: float
    floor: Optional[float] = None
    against: Optional[str] = None
    baseline: Optional[float] = None
    margin: Optional[float] = None
