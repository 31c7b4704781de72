"""Compares a candidate's answers, token by token, with those of the known-good.

A prompt's own tokens are scored too: there both releases see the same text, so no early difference hides what comes
after it. Greedy answers part sooner or later on sound kernels, since a near tie falls either way; so they count as far
as they agree, and a wide share of them may differ. What a release answered is kept with its commit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import files, host, knowledge
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.host import Folders
from kernelswap.agent.server import Failed
from kernelswap.measured import DRIFT_FILE, DRIFT_REFERENCE_FILE, Drift, DriftReference, DriftVerdict, Scored
from kernelswap.protocol import Cause, DriftLimits, HostFault, Plan, decode, encode

TOKENS = 32  # of each answer
TOP = 8
AT_ONCE = 4  # prompts; another number makes other batches, and so other numerics
REST = 1e-4  # probability below which all tokens outside the top k are taken for rounding
CONFIGURATION = ("config.json", "tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "hf_quant_config")
WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


class Incomparable(Exception):
    """The text says why."""


class Garbled(Exception):
    """A server's answer that no sound one gives."""


def check(
    plan: Plan, server: Client, folders: Folders, evidence: Path, against: Optional[str]
) -> Tuple[str, Dict[str, float]]:
    """Ask the server, compare it with what the release `against` answered, and leave both in the evidence.

    Returns what was seen, and the figures. Raises Failed if they are beyond their limits, or if the server did not
    answer what the known-good did.
    """
    limits = plan.verify.drift or DriftLimits()
    where = str(evidence / DRIFT_FILE)
    known_good, missing = known(folders, against)
    try:
        mine = measure(plan, server, limits.prompts)
    except Unanswered as error:
        todo = "read the server's log; where the backend gives no such logprobs, set verify.drift: null"
        if known_good:
            raise Failed(Cause(str(error), where, todo, "drift", "release")) from None
        return f"nothing to compare with, and none recorded: {error}", {}
    except Garbled as error:
        raise Failed(Cause(str(error), where, "choose another backend", "drift", "release")) from None
    except (OSError, ValueError) as error:
        raise Failed(Cause(f"cannot ask: {error}", where, "make it readable", "drift")) from None
    verdict = judge(mine, known_good, missing, limits)
    files.keep(evidence / DRIFT_FILE, encode(verdict))
    files.keep(evidence / DRIFT_REFERENCE_FILE, encode(mine))
    if known_good and verdict.verdict == "fail" and limits.policy == "rollback":
        raise Failed(_cause(verdict, mine, known_good, where), verdict.numbers)
    return verdict.why, verdict.numbers


def measure(plan: Plan, server: Client, path: str = "") -> DriftReference:
    """What a server answers, and how far it is from itself. Raises Unanswered, Garbled, OSError or ValueError."""
    model, digest, written = model_of(plan)
    scored, long = prompts(path)
    asked = hashlib.sha256(json.dumps([scored, long, TOKENS]).encode()).hexdigest()
    until = time.monotonic() + plan.timeouts.drift
    one = plan.timeouts.smoke
    samples, again = (answers(server, scored, long, until, one, at_once) for at_once in (AT_ONCE, 1))
    try:
        noise = compare(samples, again)
    except Incomparable as error:
        raise Garbled(f"asked twice, the server answered with {error}") from None
    return DriftReference(plan.release, model, digest, written, asked, samples, noise)


def _cause(verdict: DriftVerdict, mine: DriftReference, known_good: DriftReference, where: str) -> Cause:
    """A release is not to blame for weights that were exchanged under it."""
    if known_good.written != mine.written:
        todo = f"restore {mine.model}, or set verify.drift: {{policy: note}} for this swap if it was meant to change"
        return Cause(f"{verdict.why}; its weights were written since then", where, todo, "drift")
    todo = "choose another backend, or set verify.drift: {policy: note} for this swap if other numerics are meant"
    return Cause(verdict.why, where, todo, "drift", "release")


def known(folders: Folders, release: Optional[str]) -> Tuple[Optional[DriftReference], str]:
    """What a committed release answered; or why that is not known."""
    if release is None:
        return None, "there is no known-good to compare with"
    text = files.read(folders.measured(release) / DRIFT_REFERENCE_FILE)
    if text is None:
        return None, f"nothing is stored of {release}"
    try:
        return decode(DriftReference, text), ""
    except ValueError as error:
        return None, f"what is stored of {release} cannot be read: {error}"


def judge(
    mine: DriftReference, known_good: Optional[DriftReference], missing: str, limits: DriftLimits
) -> DriftVerdict:
    """The verdict, from what both answered."""
    verdict = partial(
        DriftVerdict, release=mine.release, prompts=len(mine.samples), tokens=mine.noise.tokens,
        own_noise=mine.noise.numbers,
    )  # fmt: skip
    if known_good is None:
        return verdict("recorded", missing)
    try:
        drift = _compared(known_good, mine)
    except Incomparable as error:
        return verdict("recorded", f"{known_good.release} was measured with {error}", against=known_good.release)
    allowed = allowance(limits, known_good.noise)
    over = excess(drift, allowed)
    summary = f"mean logprob difference {drift.mean_logprob:.4f}, KL {drift.kl:.4f}, {drift.equal:.0%} equal tokens"
    return verdict(
        "fail" if over else "pass",
        f"the answers are not those of {known_good.release}: {'; '.join(over)}" if over else summary,
        against=known_good.release,
        tokens=drift.tokens,
        equal=drift.equal,
        first_divergence=drift.first_divergence,
        mean_logprob=drift.mean_logprob,
        worst_prompt=drift.worst_prompt,
        worst_logprob=drift.worst_logprob,
        kl=drift.kl,
        limits=allowed,
        noise=known_good.noise.numbers,
    )


def _compared(known_good: DriftReference, mine: DriftReference) -> Drift:
    for name, what in (("model", "another model"), ("files", "other files of the model"), ("prompts", "other prompts")):
        if getattr(known_good, name) != getattr(mine, name):
            raise Incomparable(what)
    return compare(known_good.samples, mine.samples)


def allowance(limits: DriftLimits, noise: Drift) -> Dict[str, float]:
    """What each figure may be: for `equal` at least, for the others at most."""
    many = limits.noise_multiple
    return {
        "equal": max(0.0, min(limits.equal_tokens, 1 - many * (1 - noise.equal))),
        "mean_logprob": max(limits.mean_logprob, many * noise.mean_logprob),
        "worst_prompt": max(limits.worst_prompt, many * noise.worst_prompt),
        "kl": max(limits.kl, many * noise.kl),
    }


def excess(drift: Drift, allowed: Dict[str, float]) -> List[str]:
    """The figures that are beyond what is allowed, each with its limit."""
    over = []
    if drift.equal < allowed["equal"]:
        over.append(f"{drift.equal:.1%} equal tokens, at least {allowed['equal']:.1%} must be")
    what = {
        "mean_logprob": "mean logprob difference",
        "worst_prompt": "logprob difference in the worst prompt",
        "kl": "KL",
    }
    for name, text in what.items():
        value = drift.numbers[name]
        if value > allowed[name]:
            over.append(f"{text} {value:.4f}, limit {allowed[name]:.4f}")
    return over


def compare(known_good: Sequence[Scored], candidate: Sequence[Scored]) -> Drift:
    """How far two releases are apart on the same prompts. Raises Incomparable if these became other tokens."""
    pairs = [_pair(old, new) for old, new in zip(known_good, candidate)]
    differences = [difference for pair in pairs for difference in pair.differences]
    divergences = [value for pair in pairs for value in pair.divergences]
    return Drift(
        tokens=len(differences),
        equal=sum(pair.equal for pair in pairs) / sum(pair.answered for pair in pairs),
        first_divergence=min((pair.first for pair in pairs if pair.first is not None), default=None),
        mean_logprob=mean(differences),
        worst_prompt=max(mean(pair.differences) for pair in pairs),
        worst_logprob=max(difference for pair in pairs for difference in pair.differences[pair.given :]),
        kl=mean(divergences),
    )


@dataclass(frozen=True)
class _Pair:
    """Two answers to one prompt: a difference and a divergence for each token that both saw the same text before."""

    given: int
    differences: List[float]
    divergences: List[float]
    first: Optional[int]
    equal: int
    answered: int


def _pair(old: Scored, new: Scored) -> _Pair:
    if old.ids[: old.given] != new.ids[: new.given]:
        raise Incomparable("other tokens for the same prompts")
    shared = min(len(old.ids), len(new.ids))
    same = [old.ids[index] == new.ids[index] for index in range(shared)]
    apart = same.index(False) if False in same else shared
    differences, divergences = [], []
    for index in range(min(apart + 1, shared)):
        before = dict(zip(old.top_ids[index], old.top_logprobs[index]))
        after = dict(zip(new.top_ids[index], new.top_logprobs[index]))
        # Where they part, what new thought of old's token: at most what it thought of the least that it tells.
        mine = new.logprobs[index] if same[index] else after.get(old.ids[index], min(after.values()))
        differences.append(abs(old.logprobs[index] - mine))
        divergences.append(divergence(before, after))
    first = apart - old.given if apart < shared else None
    return _Pair(old.given, differences, divergences, first, sum(same[old.given :]), shared - old.given)


def divergence(old: Dict[int, float], new: Dict[int, float]) -> float:
    """KL(old || new) over old's top tokens and one more for all others: at most what it is over all tokens.

    old, new: logprob by token. One that new does not have is at most as probable there as its least.
    """
    least = min(new.values())
    inside = sum(math.exp(value) * (value - new.get(token, least)) for token, value in old.items())
    outside = max(REST, 1 - sum(map(math.exp, old.values())))
    at_most = max(REST, 1 - sum(math.exp(new[token]) for token in old if token in new))
    return max(0.0, inside + outside * math.log(outside / at_most))


# What is asked, and of which model.


def prompts(path: str = "") -> Tuple[List[str], List[str]]:
    """Those whose tokens are scored too, and long ones of which only the answer is: a score for each of thousands of
    tokens takes GPU memory that a full server does not have. Raises OSError or ValueError."""
    if not path:
        own = json.loads(knowledge.read("drift_prompts.json"))
        return own["scored"], own["long"]
    try:
        texts = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{path}: is no JSON list of texts")
    return texts, []


def faults(plan: Plan) -> List[HostFault]:
    """What a swap would otherwise meet only after its stop: files on the host that cannot be used."""
    wanted = plan.verify.drift
    try:
        prompts(wanted.prompts if wanted else "")
    except OSError as error:
        return [HostFault(f"{error.filename}: {error.strerror}", "put it there, or change `prompts` of verify.drift")]
    except ValueError as error:
        return [HostFault(str(error), "correct it, or change `prompts` of verify.drift")]
    return []


def answers(
    server: Client, scored: Sequence[str], long: Sequence[str], until: float, one: float, at_once: int
) -> Tuple[Scored, ...]:
    """Ask all prompts, always in the same order, `until` by time.monotonic(), and no answer for longer than `one`: a
    server that hangs is not waited for as long as many answers may take. Raises Unanswered or Garbled."""

    def answer(prompt: str, too: bool) -> Scored:
        timeout = max(0.001, min(one, until - time.monotonic()))
        return parse(server.score(prompt, TOKENS, TOP, too, timeout))

    with ThreadPoolExecutor(at_once) as pool:
        return tuple(pool.map(answer, [*scored, *long], [True] * len(scored) + [False] * len(long)))


def parse(answer: Dict[str, Any]) -> Scored:
    """An answer of `/generate`. Raises Unanswered if it has no logprobs, Garbled if one of them is no number.

    The first token of a prompt has none, for nothing is before it.
    """
    meta = answer.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    given = _rows(meta, "input_token_logprobs", "input_top_logprobs")[1:]
    chosen = _rows(meta, "output_token_logprobs", "output_top_logprobs")
    rows = given + chosen
    if not chosen or not all(top for _, top in rows):
        raise Unanswered("POST /generate: the answer lacks logprobs")
    try:
        return Scored(
            ids=tuple(int(token[1]) for token, _ in rows),
            logprobs=tuple(_finite(token[0]) for token, _ in rows),
            top_ids=tuple(tuple(int(item[1]) for item in top) for _, top in rows),
            top_logprobs=tuple(tuple(_finite(item[0]) for item in top) for _, top in rows),
            given=len(given),
        )
    except (TypeError, ValueError, IndexError) as error:
        raise Garbled(f"a logprob is no number: {error}") from None


def _rows(meta: Dict[str, Any], tokens: str, top: str) -> List[Tuple[Any, Any]]:
    chosen, most = meta.get(tokens), meta.get(top)
    return list(zip(chosen, most)) if isinstance(chosen, list) and isinstance(most, list) else []


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(str(value))
    return round(float(value), 5)


def model_of(plan: Plan) -> Tuple[str, str, float]:
    """The model's folder with links followed, a digest of what makes it this model, and when its weights were written.

    Weights of hundreds of GB are known by name and size. Raises OSError.
    """
    folder = Path(os.path.realpath(plan.model_path))
    digest, written = hashlib.sha256(), 0.0
    for path in sorted(folder.iterdir()):
        if path.name.startswith(CONFIGURATION):
            digest.update(f"{path.name} {host.digest(path)}\n".encode())
        elif path.suffix in WEIGHTS:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size}\n".encode())
            written = max(written, status.st_mtime)
    return str(folder), digest.hexdigest(), written
