"""Asks a started server what no sound one gets wrong, and judges its answers.

Two kinds of checks. Some hold for whatever model: they compare what the server says with what it says elsewhere. Others
look at texts, and a small or base model writes poor ones legitimately: those count as many, against those that the
known-good wrote, see garbled.excess.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import client, knowledge
from kernelswap.agent.client import Client, Generated, Unanswered
from kernelswap.agent.verify import answers, garbled
from kernelswap.protocol import Answer, Plan

FILE = "smoke.json"  # in the evidence, and kept with the commit
BURST = 64  # requests at once, at most
NATIVE = 24  # requests of the burst, at least: their tokens show one corrupted in 50 in all but 1 of 10000 bursts
TOKENS = 24  # of each
WORDS = 48  # tokens of a text that is read
LONG = 16_384  # tokens of the long prompt, at most
NO_GRAMMAR = re.compile(r"[Gg]rammar.*not supported")


@dataclass
class Asked:
    """What has come of the questions so far. kinds: of the texts that were read, "" for a sound one."""

    server: Client
    until: float
    faults: List[str] = field(default_factory=list)
    kinds: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    requests: int = 0

    @property
    def left(self) -> float:
        """Seconds that the next request may take."""
        return max(0.001, self.until - time.monotonic())

    @property
    def garbled(self) -> float:
        """The share of garbled texts."""
        return sum(map(bool, self.kinds)) / len(self.kinds) if self.kinds else 0.0

    def run(self, name: str, check: Callable[[], Sequence[str]]) -> None:
        """Add a check's faults; a deadline that is over is one for all that was not asked."""
        late = "not done in time: raise timeouts.smoke if the model is slow"
        if self.until <= time.monotonic():
            found: Sequence[str] = [] if any(late in fault for fault in self.faults) else [late]
        else:
            try:
                found = check()
            except Unanswered as error:
                found = [str(error)]
        self.faults += [f"{name}: {fault}" for fault in found if f"{name}: {fault}" not in self.faults]


@cache
def prompts() -> Dict[str, Any]:
    data: Dict[str, Any] = json.loads(knowledge.read("prompts.json"))
    return data


def unique(text: str) -> str:
    """A prompt that no cache has seen."""
    return f"{secrets.token_hex(6)}: {text}"


def ask(plan: Plan, server: Client, known: Optional[float] = None) -> Asked:
    """All questions, the easy ones again after the hard ones. known: the known-good's share of garbled texts."""
    asked = Asked(server, time.monotonic() + plan.timeouts.smoke)
    _ask_simple(asked, plan.verify.answers)
    asked.run("burst", lambda: _check_burst(asked, plan))
    asked.run("long prompt", lambda: _check_long(asked, plan))
    asked.run("grammar", lambda: _check_grammar(asked))
    _ask_simple(asked, plan.verify.answers)
    texts = garbled.excess(asked.kinds, known)
    if texts:
        asked.faults.append(f"texts: {texts}")
    return asked


def _ask_simple(asked: Asked, known: Sequence[Answer]) -> None:
    asked.run("tokens", lambda: _check_tokens(asked))
    for name, plain, stream in (
        ("completion", asked.server.complete, asked.server.stream_completion),
        ("chat", lambda *words: asked.server.chat(*words).text, asked.server.stream_chat),
    ):
        asked.run(name, lambda plain=plain, stream=stream: _check_stream(asked, plain, stream))  # type: ignore[misc]
    for answer in known:
        asked.run(f"answer to {answer.prompt!r}", lambda answer=answer: check_answer(asked.server, answer, asked.left))  # type: ignore[misc]


def _check_tokens(asked: Asked) -> List[str]:
    """One greedy prompt three times, of which the first fills the prefix cache: the others run the same kernels on the
    same shapes, and a sound GPU server may differ only between a cold and a warm prompt."""
    prompt = unique(prompts()["continue"][0])
    replies = [asked.server.generate(prompt, TOKENS, asked.left, answers.TOP) for _ in range(3)]
    found = [fault for reply in replies for fault in answers.faults(reply, TOKENS)]
    return list(dict.fromkeys([*found, answers.parted(*replies[1:])]))[:3] if found else _some(answers.parted(*replies[1:]))


def _some(*faults: str) -> List[str]:
    return [fault for fault in faults if fault]


def _check_stream(asked: Asked, plain: Callable[..., str], stream: Callable[..., str]) -> List[str]:
    """A stream must say what the plain answer says. A server that answers differently each time is judged by its tokens."""
    prompt = unique(prompts()["continue"][1])
    plain(prompt, TOKENS, asked.left)
    said, streamed = plain(prompt, TOKENS, asked.left), stream(prompt, TOKENS, asked.left)
    if not said or not streamed:
        return ["the text is empty" if not said else "the stream is empty"]
    if said == streamed:
        return []
    others = {plain(prompt, TOKENS, asked.left) for _ in range(3)}
    if others != {said}:
        if streamed in others:
            return []
        return [f"asked again, answered {said[:60]!r}, {min(others - {said})[:60]!r}, and streamed {streamed[:60]!r}"]
    return [f"streamed {streamed[:80]!r}, and answered {said[:80]!r} without"]


def check_answer(server: Client, answer: Answer, left: float) -> List[str]:
    reply = server.chat(answer.prompt, answer.max_tokens, left)
    if re.search(answer.expect, reply.text):
        return []
    cut = f" (cut at max-tokens {answer.max_tokens}: raise it if the model was still thinking)" if reply.cut else ""
    return [f"expected /{answer.expect}/, got {reply.text[:200]!r}{cut}"]


def _check_burst(asked: Asked, plan: Plan) -> List[str]:
    """Many at once, in many scripts: tokens are counted and checked, texts are read, known answers must be right here too."""
    width = burst(plan)
    texts = prompts()["continue"] + prompts()["scripts"]
    counted = [texts[index % len(texts)] for index in range(max(width, NATIVE))]
    server, faults, generated = asked.server, [], []

    def count(text: str) -> List[str]:
        reply = server.generate(unique(text), TOKENS, asked.left, answers.TOP)
        generated.append(reply)
        return answers.faults(reply, TOKENS)

    def read(text: str) -> List[str]:
        reply = server.chat(f"{text} ({secrets.token_hex(3)})", WORDS, asked.left)
        asked.kinds.append(garbled.kind(reply.text, reply.tokens))
        return []

    jobs: List[Callable[[], List[str]]] = [lambda text=text: count(text) for text in counted]  # type: ignore[misc]
    jobs += [lambda text=text: read(text) for text in prompts()["write"]]  # type: ignore[misc]
    jobs += [lambda answer=answer: check_answer(server, answer, asked.left) for answer in plan.verify.answers]  # type: ignore[misc]
    for name, found in zip([*counted, *prompts()["write"], *(a.prompt for a in plan.verify.answers)], at_once(jobs, width)):
        faults += [f"{name[:40]!r}: {fault}" for fault in found]
    more = f"and {len(faults) - 4} more of {len(jobs)} requests" if len(faults) > 4 else ""
    return [*faults[:4], *_some(more, answers.copied(generated))]


def burst(plan: Plan) -> int:
    """Requests at once: as many as the server is to take."""
    run, most = plan.verify.throughput, plan.flags.get("max-running-requests", "")
    return min(BURST, run.concurrency if run else int(most) if most.isdigit() else 8)


def at_once(jobs: Sequence[Callable[[], List[str]]], width: int) -> List[List[str]]:
    """What came of each job; an answer that did not come is its fault."""

    def guarded(job: Callable[[], List[str]]) -> List[str]:
        try:
            return job()
        except Unanswered as error:
            return [str(error)]

    with ThreadPoolExecutor(max(1, width)) as pool:
        return list(pool.map(guarded, jobs))


def _check_long(asked: Asked, plan: Plan) -> List[str]:
    """A prompt that is prefilled in more than one chunk, if the server's context has room for it."""
    sentence = prompts()["continue"][2]
    info = asked.server.info(asked.left)
    limits = [int(info[key]) - 2 * TOKENS for key in ("context_length", "max_req_input_len", "max_total_num_tokens") if info.get(key)]
    chunk = max(1024, int(info.get("chunked_prefill_size") or 0))
    wanted = min([chunk + chunk // 4, LONG, *(limit * 9 // 10 for limit in limits)])
    per = max(1, asked.server.generate(unique(sentence * 10), 1, asked.left).prompt // 10)
    reply = asked.server.generate(unique(sentence * max(1, wanted // per)), TOKENS, asked.left, answers.TOP)
    return [f"of {reply.prompt} tokens: {fault}" for fault in answers.faults(reply, TOKENS)]


def _check_grammar(asked: Asked) -> List[str]:
    """What a grammar allows only one way must come out just so, in every script, whatever the model would rather say."""
    text = " ".join(prompts()["exact"])
    try:
        reply = asked.server.generate(unique("Say"), 4 * len(text.encode()), asked.left, sampling={"regex": re.escape(text).replace("\\ ", " "), "ignore_eos": False})
    except Unanswered as error:
        if NO_GRAMMAR.search(str(error)):
            asked.notes.append("no grammar backend")
            return []
        raise
    found = [] if reply.text == text else [f"a grammar that allows only {text[:60]!r} gave {reply.text[:60]!r}"]
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "東京", "Москва"]}, "large": {"type": "boolean"}}, "required": ["city", "large"], "additionalProperties": False}
    reply = asked.server.generate(unique(prompts()["continue"][0]), 256, asked.left, sampling={"json_schema": json.dumps(schema), "ignore_eos": False})
    return found + json_faults(reply.text, cut=reply.count == 256)


def json_faults(text: str, cut: bool) -> List[str]:
    """Of an answer that had to be {"city": a name, "large": true or false}. cut: a model may add blanks for ever."""
    try:
        value = json.loads(text)
    except ValueError:
        return [] if cut and len(text.split()) < 16 else [f"a JSON schema gave no JSON: {text[:80]!r}"]
    right = isinstance(value, dict) and value.get("city") in ("Paris", "東京", "Москва") and isinstance(value.get("large"), bool)
    return [] if right and len(value) == 2 else [f"a JSON schema gave what it forbids: {text[:80]!r}"]
