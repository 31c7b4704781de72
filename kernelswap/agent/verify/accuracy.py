"""Graded questions through SGLang's own evaluator: whether a model still solves what it solved."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import time
from pathlib import Path
from statistics import mean
from typing import Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import client, engine, files, host
from kernelswap.agent.host import Folders
from kernelswap.agent.redaction import redact
from kernelswap.agent.server import Failed
from kernelswap.measured import ACCURACY_FILE, AccuracyVerdict
from kernelswap.protocol import Accuracy, Cause, Plan, encode

AT_ONCE = 64  # questions, at most
MAX_TOKENS = 512  # of an answer, as the evaluator's own default

# Its own command line passes no key, and has spelled the address in several ways.
EVALUATE = """
import json, os, sys
from types import SimpleNamespace
from sglang.test import few_shot_gsm8k as evaluator
options = json.load(sys.stdin)
server, endpoint = options.pop("server"), evaluator.RuntimeEndpoint
evaluator.RuntimeEndpoint = lambda _address: endpoint(server, api_key=os.environ.get("OPENAI_API_KEY"))
print(json.dumps(float(evaluator.run_eval(SimpleNamespace(**options))["accuracy"])))
"""


def check(
    plan: Plan, api_key: str, folders: Folders, evidence: Path, against: Optional[str]
) -> Tuple[str, Dict[str, float]]:
    """Ask all questions `runs` times. Returns what was seen, and figures. Raises Failed if too few are right."""
    wanted = plan.verify.accuracy
    if wanted is None:
        return "", {}
    asked = f"{host.digest(Path(wanted.file))} {wanted.questions} {wanted.shots} {plan.model_path}"
    until = time.monotonic() + plan.timeouts.accuracy
    scores = [run(plan, wanted, api_key, max(1.0, until - time.monotonic())) for _ in range(wanted.runs)]
    key = hashlib.sha256(asked.encode()).hexdigest()
    known_good = host.measured(folders, against, ACCURACY_FILE, AccuracyVerdict)
    verdict = judge(plan.release, key, scores, wanted, known_good)
    files.keep(evidence / ACCURACY_FILE, encode(verdict))
    numbers = {"accuracy": round(verdict.mean, 4), "spread": round(verdict.spread, 4)}
    if verdict.verdict == "fail":
        todo = "choose another backend, or lower verify.accuracy.floor"
        cause = Cause(verdict.why, str(evidence / ACCURACY_FILE), todo, "accuracy", "release")
        raise Failed(cause, numbers)
    return verdict.why, numbers


def judge(
    release: str, key: str, scores: Sequence[float], wanted: Accuracy, known_good: Optional[AccuracyVerdict]
) -> AccuracyVerdict:
    """Against the floor, and against the known-good beyond what chance explains: the spread of its runs, or two
    standard errors of a share of so many questions. The candidate's own spread excuses nothing."""
    score, spread = mean(scores), max(scores) - min(scores)
    baseline = known_good if known_good and known_good.key == key else None
    margin = None
    over: List[str] = []
    if wanted.floor is not None and score < wanted.floor:
        over.append(f"{score:.1%} of {wanted.questions} answers are right, the floor is {wanted.floor:.1%}")
    if baseline:
        error = math.sqrt(baseline.mean * (1 - baseline.mean) / wanted.questions)
        margin = max(baseline.spread, 2 * error)
        if score < baseline.mean - margin:
            over.append(
                f"{score:.1%} of {wanted.questions} answers are right, {baseline.release} had {baseline.mean:.1%},"
                f" and noise explains {margin:.1%}"
            )
    judged = wanted.floor is not None or baseline is not None
    return AccuracyVerdict(
        verdict="fail" if over else "pass" if judged else "recorded",
        why="; ".join(over) or f"{score:.1%} of {wanted.questions} answers right, spread {spread:.1%}",
        release=release,
        key=key,
        scores=tuple(scores),
        mean=score,
        spread=spread,
        floor=wanted.floor,
        against=baseline.release if baseline else None,
        baseline=baseline.mean if baseline else None,
        margin=margin,
    )


def run(plan: Plan, wanted: Accuracy, api_key: str, timeout: float) -> float:
    """The share of right answers of one run, which may take `timeout` seconds. Raises Failed."""
    options = {
        "server": client.base_url(plan),
        "host": "127.0.0.1",
        "port": plan.port,
        "data_path": wanted.file,
        "num_questions": wanted.questions,
        "num_shots": wanted.shots,
        "parallel": min(AT_ONCE, wanted.questions),
        "max_new_tokens": MAX_TOKENS,
    }
    where = f"{plan.python} -m sglang.test.few_shot_gsm8k"
    try:
        with engine.scratch(plan) as folder:
            extra = {"TMPDIR": folder, **({"OPENAI_API_KEY": api_key} if api_key else {})}
            words = ["-W", "ignore", "-c", EVALUATE]
            done = engine.run(plan, words, timeout, json.dumps(options), extra, folder)
    except subprocess.TimeoutExpired:
        what, todo = f"not done within {plan.timeouts.accuracy:g} s", "raise timeouts.accuracy, or ask fewer questions"
        raise Failed(Cause(what, where, todo, "accuracy", "release")) from None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        score = float(lines[-1])
        if math.isfinite(score):
            return score
        raise ValueError(lines[-1])
    except (IndexError, ValueError):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        last = redact(said[-1] if said else f"exit {done.returncode}", [api_key])
        what = f"the evaluator gave no score: {last[:200]}"
        raise Failed(Cause(what, where, "run it by hand", "accuracy", "host")) from None
