"""How fast a server is: a ladder of concurrencies, each measured several times in turn, cold and after a warm-up.

The runs of the points alternate, so that whatever changes with time strikes all of them. What cannot be judged (a cache
that was warm, a client that was the bottleneck) is no measurement; what the server did wrong is a failure.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import client, files, host
from kernelswap.agent.client import Client
from kernelswap.agent.host import Folders
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import bench, drift, gates, telemetry
from kernelswap.agent.verify.bench import Benchmark, NoResult
from kernelswap.agent.verify.elsewhere import Meter
from kernelswap.measured import BASELINE, BENCH_FILE, THROUGHPUT_FILE, Run, ThroughputResult, ThroughputVerdict
from kernelswap.protocol import Cause, Gpu, Plan, Throughput, encode

COLD = 0.10  # share of the prompts' tokens that may come out of the cache: random prompts of a small vocabulary repeat
SPECIAL = 0.1  # share of a prompt's tokens that an older benchmark, which sends text, leaves to the tokenizer's own
AGAIN = 2  # more tries of a run that was not cold
FLUSH = 30.0  # seconds for the server to become idle, which it must be to flush

Tell = Callable[[str], None]


class Unmeasured(Exception):
    """Nothing was measured that can be judged; the text says why."""


@dataclass(frozen=True)
class Target:
    """The server that is measured. plan: its own; keys: its secrets by flag."""

    plan: Plan
    keys: Dict[str, str]

    def flush(self) -> bool:
        """Empty the server's prefix cache; whether it did. Where there is an admin's key, only that may."""
        key = self.keys.get("admin-api-key") or self.keys.get("api-key", "")
        return Client(client.base_url(self.plan), self.plan.served_name, key).flush(FLUSH)


def key(plan: Plan, wanted: Throughput, cards: Sequence[Gpu], identity: str) -> str:
    """Digest of all that must be equal for two results to be compared: the runs, the model, the GPUs with their driver,
    and the SGLang whose benchmark it is, see engine.IDENTITY. The known-good is measured again where any changed."""
    model: List[str] = [plan.model, plan.model_path]
    with contextlib.suppress(OSError):
        model += drift.model_of(plan)[:2]
    runs = [wanted.ladder, wanted.input_tokens, wanted.output_tokens, wanted.requests]
    decides = [runs, model, [(gpu.name, gpu.uuid, gpu.driver) for gpu in cards], plan.python, identity]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def stored(folders: Folders, release: Optional[str], key: str) -> Optional[ThroughputResult]:
    """What a release was measured at, if it can be compared."""
    with contextlib.suppress(OSError):
        verdict = host.measured(folders, release, THROUGHPUT_FILE, ThroughputVerdict)
        found = verdict.candidate if verdict else None
        return found if found and found.points and found.key == key else None
    return None


def keep(folders: Folders, result: ThroughputResult) -> None:
    """For later swaps."""
    verdict = ThroughputVerdict("recorded", "measured before it was replaced", result)
    files.keep(folders.measured(result.release) / THROUGHPUT_FILE, encode(verdict) + "\n")


def check(
    plan: Plan,
    wanted: Throughput,
    keys: Dict[str, str],
    known: Optional[ThroughputResult],
    key: str,
    evidence: Path,
    tell: Tell,
) -> ThroughputVerdict:
    """Measure until the verdict is clear, or no more runs help. keys: the server's secrets by flag; key: of the result.

    Raises Failed if it is too slow, or answers wrongly.
    """
    where = f"{evidence}/{BENCH_FILE}"
    with Session(plan, Target(plan, keys), wanted, key, evidence, tell) as session:
        try:
            verdict = _measured(session, wanted, known)
        except Unmeasured as why:
            empty = ThroughputResult(plan.release, key, ())
            floor = "; so its floor could not be judged" if wanted.floor is not None or wanted.floors else ""
            verdict = ThroughputVerdict("inconclusive", f"not measured: {why}{floor}", empty, known, floor=wanted.floor)
    files.keep(evidence / THROUGHPUT_FILE, encode(verdict) + "\n")
    if verdict.verdict == "fail":
        todo = "try another backend, or change verify.throughput"
        raise Failed(Cause(verdict.why, where, todo, "throughput", "release"))
    if verdict.verdict == "inconclusive" and wanted.inconclusive == "rollback":
        todo = "make the host quieter or the runs longer, or let verify.throughput.inconclusive commit it"
        raise Failed(Cause(f"inconclusive: {verdict.why}", where, todo, "throughput"))
    return verdict


def _measured(session: Session, wanted: Throughput, known: Optional[ThroughputResult]) -> ThroughputVerdict:
    for look in range(1, gates.LOOKS + 1):
        complete = session.more(wanted.repetitions, must=look == 1)
        verdict = gates.judge(wanted, session.result(), known, look)
        if verdict.verdict != "inconclusive" or not complete:
            break
        if look < gates.LOOKS:
            session.tell(f"not clear yet: {verdict.why}")
    return verdict


def baseline(plan: Plan, wanted: Throughput, old: Target, key: str, evidence: Path, tell: Tell) -> ThroughputResult:
    """Measure the known-good as the candidate will be, by the candidate's benchmark. Raises Failed or Unmeasured."""
    with Session(plan, old, wanted, key, evidence, tell, prefix=BASELINE) as session:
        session.more(wanted.repetitions)
        return session.result()


class Session:
    """Runs of one server by one process of the benchmark, sampled; each is kept in the evidence."""

    def __init__(
        self, plan: Plan, target: Target, wanted: Throughput, key: str, evidence: Path, tell: Tell, prefix: str = ""
    ) -> None:
        self.tell = tell
        self._plan, self._target, self._wanted, self._key = plan, target, wanted, key
        self._evidence, self._prefix = evidence, prefix
        self._runs: Dict[int, List[Run]] = {concurrency: [] for concurrency in wanted.ladder}
        self._stack = contextlib.ExitStack()
        self._bench: Benchmark
        self._deadline = time.monotonic() + plan.timeouts.throughput

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            self._sampled = stack.enter_context(telemetry.sampling(self._target.plan, self._evidence))
            api_key = self._target.keys.get("api-key", "")
            opened = bench.opened(self._plan, self._target.plan, api_key, self._deadline)
            self._bench = stack.enter_context(opened)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()
        for note in self._sampled.notes:
            self.tell(note)

    def result(self) -> ThroughputResult:
        points = tuple(gates.point(concurrency, runs) for concurrency, runs in self._runs.items() if runs)
        return ThroughputResult(self._target.plan.release, self._key, points)

    def more(self, repetitions: int, must: bool = True) -> bool:
        """So many runs of each point, after a warm-up if there was none. must: raise Failed where they do not all come
        about in time, and Unmeasured; else this is False then. Raises Failed for a server that answers wrongly."""
        try:
            if not any(self._runs.values()):
                self._warm_up()
            done = len(self._runs[self._wanted.concurrency])
            for number in range(done + 1, done + repetitions + 1):
                # From the highest on: a warm-up helps it most, and a cold clock or cache strikes the least telling.
                for concurrency in reversed(self._wanted.ladder):
                    self._run(concurrency, f"run c={concurrency} {number}/{done + repetitions}")
        except NoResult as error:
            if error.late and not must:
                return False
            raise self._failure(error) from None
        except Unmeasured as why:
            if must:
                raise
            self.tell(f"no more runs: {why}")
            return False
        return True

    def _failure(self, error: NoResult) -> Failed:
        where, limit = f"{self._evidence}/{BENCH_FILE}", self._plan.timeouts.throughput
        if error.late:
            todo = "raise timeouts.throughput, or lower verify.throughput.requests"
            return Failed(Cause(f"no result within {limit:g} s", where, todo, "throughput", "release"))
        blame = "host" if error.own else "release"
        return Failed(Cause(f"the benchmark gave no result: {error}", where, "run it by hand", "throughput", blame))

    def _warm_up(self) -> None:
        highest = self._wanted.concurrency
        self._measure(highest, min(highest, self._wanted.requests), "warm-up")

    def _run(self, concurrency: int, phase: str) -> None:
        """One run that counts; one that was not cold is tried again. Raises NoResult, Failed or Unmeasured."""
        requests = self._wanted.requests_at(concurrency)
        for _ in range(1 + AGAIN):
            flushed = self._target.flush()
            measured, run = self._measure(concurrency, requests, phase)
            self._check(run)
            cold = is_cold(run, flushed)
            if cold:
                break
        if not cold:
            known = run.cached_tokens is not None
            warm = (
                f"{run.cached_tokens} of {run.input_tokens} prompt tokens were cached" if known else "unknown how warm"
            )
            raise Unmeasured(f"the prefix cache could not be emptied: {warm}")
        bound = bench.client_bound(measured.ticks, concurrency, run.duration)
        if bound:
            raise Unmeasured(f"the benchmark was the bottleneck at {concurrency} concurrent requests, not the server")
        if bound is None:
            self.tell(
                f"{phase}: the benchmark was busy; whether it was the bottleneck is unknown without --enable-metrics"
            )
        self._runs[concurrency].append(run)
        self.tell(f"{self._prefix}{phase}: {run.output_tok_s:.1f} output tok/s")

    def _measure(self, concurrency: int, requests: int, phase: str) -> Tuple[bench.Measured, Run]:
        self._sampled.phase(self._prefix + phase)
        meter = Meter(self._target.plan.unit)
        try:
            measured = self._bench.run(self._wanted, concurrency, requests, secrets.randbelow(2**31))
        finally:
            self._sampled.phase("")
        elsewhere = meter.share()
        run = replace(bench.run_of(measured.values, concurrency, requests), elsewhere=elsewhere)
        times = {"started": measured.started, "ended": measured.ended}
        asked = {"concurrency": concurrency, "requests": requests, "phase": self._prefix + phase}
        line = {**measured.values, **asked, **times, "elsewhere": elsewhere}
        with contextlib.suppress(OSError):
            files.append(self._evidence / BENCH_FILE, json.dumps(line), synced=False)
        return measured, run

    def _check(self, run: Run) -> None:
        """Raises Failed where a number would say nothing, through the server's fault."""
        requests = run.completed + run.failed
        asked, sent = requests * self._wanted.output_tokens, requests * self._wanted.input_tokens
        blame = "release"
        if run.failed:
            what, todo = f"{run.failed} of {requests} benchmark requests failed", "read the server's log"
        elif run.output_tokens != asked:
            what = f"{run.output_tokens} tokens came at {run.concurrency} concurrent requests, {asked} were asked for"
            todo = "see whether prompt and answer fit into the server's context length"
        elif abs(run.input_tokens - sent) > SPECIAL * sent:
            what, todo = f"the benchmark sent {run.input_tokens} tokens, not {sent}", "see the benchmark's own options"
            blame = "host"
        else:
            return
        raise Failed(Cause(what, f"{self._evidence}/{BENCH_FILE}", todo, "throughput", blame))


def is_cold(run: Run, flushed: bool) -> bool:
    """Whether the prompts were computed: by the server's own count, else by its word that its cache was emptied."""
    if run.cached_tokens is None or not run.input_tokens:
        return flushed
    return run.cached_tokens <= COLD * run.input_tokens


def text(verdict: ThroughputVerdict) -> str:
    """In one line."""
    said = verdict.why if verdict.verdict != "pass" or verdict.baseline else f"floor {verdict.floor or 0:g}"
    head = f"{verdict.verdict}: " if verdict.verdict == "inconclusive" else ""
    return "; ".join(filter(None, (text_of(verdict.candidate), head + said)))


def text_of(result: ThroughputResult) -> str:
    return ", ".join(
        f"{point.median:.1f} output tok/s at {point.concurrency}"
        + (f" (spread {point.spread:.1%})" if len(point.runs) > 1 else "")
        for point in reversed(result.points)
    )


def numbers(verdict: ThroughputVerdict) -> Dict[str, float]:
    """For the report: of the run in the middle at the highest concurrency; prefill and decode are of one request."""
    found: Dict[str, Optional[float]] = {"difference": verdict.difference, "margin": verdict.margin}
    *lower, highest = verdict.candidate.points or (None,)
    found.update({f"output_tok_s_at_{point.concurrency}": point.median for point in lower if point})
    if highest:
        run = sorted(highest.runs, key=lambda run: run.output_tok_s)[len(highest.runs) // 2]
        ttft, itl = run.ttft.get("median"), run.itl.get("median")
        found.update(
            output_tok_s=highest.median,
            spread=highest.spread,
            runs=float(len(highest.runs)),
            input_tok_s=run.input_tok_s,
            completed=float(run.completed),
            failed=float(run.failed),
            concurrency=float(run.concurrency),
            output_tokens=float(run.output_tokens),
            prefill_tok_s=1000 * run.input_tokens / run.completed / ttft if ttft and run.completed else None,
            decode_tok_s=1000 / itl if itl else None,
            **{f"{place}_ttft_ms": value for place, value in run.ttft.items()},
            **{f"{place}_itl_ms": value for place, value in run.itl.items()},
        )
    return {name: round(value, 4) for name, value in found.items() if value is not None}
