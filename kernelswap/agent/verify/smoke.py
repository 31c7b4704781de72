"""Asks a started server what no sound one gets wrong, and judges its answers.

Two kinds of checks. Some hold for whatever model: they compare what the server says with what it says elsewhere. Others
look at texts, and a small or base model writes poor ones legitimately: those count as many, against those that the
known-good wrote, see garbled.excess.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle, islice
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from kernelswap.agent import files, knowledge
from kernelswap.agent.client import Choice, Client, Generated, Reply, Unanswered
from kernelswap.agent.host import Folders
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import answers, garbled, health
from kernelswap.measured import SMOKE_FILE
from kernelswap.protocol import Answer, Cause, Plan

BURST = 64  # requests at once, at most
FEW = 8  # where nothing says how many
NATIVE = 24  # requests of the burst, at least: their tokens show one corrupted in 50 in all but 1 of 10000 bursts
TOKENS = 24  # of each
WORDS = 48  # tokens of a text that is read
STEADY = 64  # of an answer that is asked for again: six show one wrong choice in 50 in all but 1 of 1000 servers
AGAIN = 3  # times
SHOWN = 4  # faults of a burst
UNCHUNKED = 2048  # tokens of a long prompt where none is cut into chunks
LONG_ANSWER = 256  # tokens that an answer in JSON may take
LATE = "not done in time"
LONG = 16_384  # tokens of the long prompt, at most
NO_GRAMMAR = re.compile(r"[Gg]rammar.*not supported")

Question = Callable[[str, int, float], Reply]  # prompt, tokens, seconds
Choices = Callable[[str, int, float], List[Choice]]
Check = Callable[[], List[str]]


@dataclass
class Asked:
    """What has come of the questions so far. faults: by the check's name; kinds: of the texts that were read, "" for a
    sound one."""

    server: Client
    until: float
    faults: Dict[str, str] = field(default_factory=dict)
    kinds: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds that the next request may take."""
        return max(0.001, self.until - time.monotonic())

    @property
    def garbled(self) -> float:
        """The share of garbled texts."""
        return sum(map(bool, self.kinds)) / len(self.kinds) if self.kinds else 0.0

    def run(self, name: str, check: Check) -> None:
        """Add a check's faults, unless it failed before; all that a deadline leaves unasked is one fault."""
        if name in self.faults or LATE in self.faults:
            return
        try:
            found = check() if time.monotonic() < self.until else []
        except Unanswered as error:
            found = [str(error)]
        if found:
            self.faults[name] = "; ".join(found)
        if time.monotonic() >= self.until:
            self.faults[LATE] = f"during {name}: raise timeouts.smoke if the model is slow"


@cache
def prompts() -> Dict[str, Any]:
    data: Dict[str, Any] = json.loads(knowledge.read("prompts.json"))
    return data


def unique(text: str) -> str:
    """A prompt that no cache has seen."""
    return f"{secrets.token_hex(6)}: {text}"


def check(plan: Plan, server: Client, since: float, known: Optional[float] = None) -> Tuple[str, Dict[str, float]]:
    """What was seen, and in figures. since: the server's start, epoch seconds; known: the known-good's share of garbled
    texts. Raises Failed with all faults."""
    asked = ask(plan, server, known)
    faults = [f"{name}: {fault}" for name, fault in asked.faults.items()] + health.faults(plan, since)
    if faults:
        todo = "the backend answers wrongly: choose another, or correct verify.answers if the model has changed"
        raise Failed(Cause("; ".join(faults), f"journalctl -u {plan.unit}", todo, "smoke", blame="release"))
    notes = "".join(f", {note}" for note in asked.notes)
    odd = sum(map(bool, asked.kinds))
    seen = f"{len(plan.verify.answers)} known answer(s) right, {odd} of {len(asked.kinds)} texts look garbled{notes}"
    return seen, {"garbled": round(asked.garbled, 3)}


def known(folders: Folders, release: Optional[str]) -> Optional[float]:
    """The share of garbled texts that a release was committed with."""
    text = files.read(folders.measured(release) / SMOKE_FILE) if release else None
    with contextlib.suppress(ValueError, AttributeError):  # it decides little: a torn file is none
        return json.loads(text).get("garbled") if text else None
    return None


def ask(plan: Plan, server: Client, known: Optional[float] = None) -> Asked:
    """All questions, the first ones again after the hard ones. known: the known-good's share of garbled texts."""
    asked = Asked(server, time.monotonic() + plan.timeouts.smoke)
    _ask_first(asked, plan.verify.answers)
    asked.run(
        "completion",
        partial(_check_stream, asked, server.complete, server.stream_completion, server.completion_choices),
    )
    asked.run("chat", partial(_check_stream, asked, server.chat, server.stream_chat, server.chat_choices))
    asked.run("burst", partial(_check_burst, asked, plan))
    asked.run("long prompt", partial(_check_long, asked))
    asked.run("grammar", partial(_check_grammar, asked))
    _ask_first(asked, plan.verify.answers)
    texts = garbled.excess(asked.kinds, plan.verify.smoke.garbled, known)
    if texts:
        asked.faults["texts"] = texts
    return asked


def _ask_first(asked: Asked, known: Sequence[Answer]) -> None:
    asked.run("tokens", partial(_check_tokens, asked))
    for answer in known:
        asked.run(f"answer to {answer.prompt!r}", partial(check_answer, asked, answer))


def _check_tokens(asked: Asked) -> List[str]:
    """One greedy prompt again and again, once a first question has filled the prefix cache: then the same kernels run
    on the same shapes, while a sound GPU server may differ between a cold and a warm prompt."""
    prompt = unique(prompts()["continue"][0])
    asked.server.generate(prompt, 1, asked.left)
    replies = [asked.server.generate(prompt, STEADY, asked.left, answers.TOP) for _ in range(AGAIN)]
    found = [fault for reply in replies for fault in answers.faults(reply, STEADY)]
    return found[:2] or _some(*(answers.parted(replies[0], reply) for reply in replies[1:]))[:1]


def _some(*faults: str) -> List[str]:
    return [fault for fault in faults if fault]


def _check_stream(asked: Asked, plain: Question, stream: Question, choices: Choices) -> List[str]:
    """A stream must say what the plain answer says, and a plain answer the same each time: once the first question has
    filled the prefix cache, as above."""
    prompt = unique(prompts()["continue"][1])
    plain(prompt, TOKENS, asked.left)
    said, streamed = plain(prompt, TOKENS, asked.left).text, stream(prompt, TOKENS, asked.left).text
    if not said or not streamed:
        return ["the text is empty" if not said else "the stream is empty"]
    if said == streamed:
        return []
    again = {plain(prompt, TOKENS, asked.left).text for _ in range(AGAIN)}
    told: List[Choice] = []
    with contextlib.suppress(Unanswered):  # not every server tells its tokens
        told = choices(prompt, TOKENS, asked.left)
    # Near ties, see answers.parted; a server that is corrupt each time is not so lucky.
    if streamed in again or answers.tied(told, streamed):
        return []
    if again == {said}:
        return [f"streamed {streamed[:80]!r}, and answered {said[:80]!r} without"]
    return [f"asked again, answered {said[:60]!r}, {min(again - {said})[:60]!r}, and streamed {streamed[:60]!r}"]


def check_answer(asked: Asked, answer: Answer) -> List[str]:
    reply = asked.server.chat(answer.prompt, answer.max_tokens, asked.left)
    if re.search(answer.expect, reply.text):
        return []
    cut = f" (cut at max-tokens {answer.max_tokens}: raise it if the model was still thinking)" if reply.cut else ""
    return [f"expected /{answer.expect}/, got {reply.text[:200]!r}{cut}"]


def _check_burst(asked: Asked, plan: Plan) -> List[str]:
    """Many at once, in many scripts: tokens are checked, texts are read, and known answers must be right here too."""
    width = burst(plan)
    texts = prompts()["continue"] + prompts()["scripts"]
    generated: List[Generated] = []

    def count(text: str) -> List[str]:
        generated.append(asked.server.generate(unique(text), TOKENS, asked.left, answers.TOP))
        return answers.faults(generated[-1], TOKENS)

    def read(text: str) -> List[str]:
        reply = asked.server.chat(f"{text} ({secrets.token_hex(3)})", WORDS, asked.left)
        asked.kinds.append(garbled.kind(reply.text, reply.tokens))
        return []

    jobs = [(text, partial(count, text)) for text in islice(cycle(texts), max(width, NATIVE))]
    jobs += [(text, partial(read, text)) for text in prompts()["write"]]
    jobs += [(answer.prompt, partial(check_answer, asked, answer)) for answer in plan.verify.answers]

    def told(job: Tuple[str, Check]) -> List[str]:
        name, check = job
        try:
            return [f"{name[:40]!r}: {fault}" for fault in check()]
        except Unanswered as error:
            return [f"{name[:40]!r}: {error}"]

    with ThreadPoolExecutor(width) as pool:
        faults = [fault for found in pool.map(told, jobs) for fault in found]
    more = f"and {len(faults) - SHOWN} more of {len(jobs)} requests" if len(faults) > SHOWN else ""
    return [*faults[:SHOWN], *_some(more, answers.copied(generated))]


def burst(plan: Plan) -> int:
    """Requests at once: as many as the server is to take."""
    run, most = plan.verify.throughput, plan.flags.get("max-running-requests", "")
    return min(BURST, run.concurrency if run else int(most) if most.isdigit() and int(most) else FEW)


def _check_long(asked: Asked) -> List[str]:
    """A prompt that is prefilled in more than one chunk, if the server's context has room for it."""
    sentence = prompts()["continue"][2]
    each = max(1, asked.server.generate(unique(sentence * 10), 1, asked.left).prompt // 10)
    info: Dict[str, Any] = {}
    with contextlib.suppress(Unanswered):
        info = asked.server.server_info(asked.left)
    count = max(1, long_prompt(info) // each)
    reply = asked.server.generate(unique(sentence * count), TOKENS, asked.left, answers.TOP)
    asked.notes.append(f"a prompt of {reply.prompt} tokens")
    return [f"of {reply.prompt} tokens: {fault}" for fault in answers.faults(reply, TOKENS)]


def long_prompt(info: Dict[str, Any]) -> int:
    """Tokens of a prompt beyond one prefill chunk, as far as the context has room. info: /server_info."""
    room = [info.get(name) for name in ("context_length", "max_req_input_len", "max_total_num_tokens")]
    chunk = info.get("chunked_prefill_size")
    wanted = chunk + chunk // 4 if isinstance(chunk, int) and chunk > 0 else UNCHUNKED
    return min([wanted, LONG, *((size - TOKENS) * 8 // 10 for size in room if isinstance(size, int) and size > 0)])


def _check_grammar(asked: Asked) -> List[str]:
    """What a grammar allows only one way must come out so, in every script, whatever the model would rather say."""
    text = " ".join(prompts()["exact"])
    only = {"regex": re.escape(text).replace("\\ ", " "), "ignore_eos": False}
    city = {"json_schema": json.dumps(prompts()["schema"]), "ignore_eos": False}
    try:
        exact = asked.server.generate(unique("Say"), 4 * len(text.encode()), asked.left, sampling=only)
    except Unanswered as error:
        if NO_GRAMMAR.search(str(error)):
            asked.notes.append("no grammar backend")
            return []
        raise
    prompt = unique(prompts()["continue"][0])
    reply = asked.server.generate(prompt, LONG_ANSWER, asked.left, sampling=city)
    wrong = f"a grammar that allows only {text!r} gave {exact.text[:80]!r}" if exact.text != text else ""
    return _some(wrong, json_fault(reply.text, cut=reply.count == LONG_ANSWER))


def json_fault(text: str, cut: bool) -> str:
    """Of an answer to prompts.json's schema. cut: it was ended, as a schema lets a model add blanks for ever."""
    try:
        value = json.loads(text)
    except ValueError:
        return "" if cut else f"a JSON schema gave no JSON: {text[:80]!r}"
    rules = prompts()["schema"]["properties"]
    right = isinstance(value, dict) and set(value) == set(rules) and value["city"] in rules["city"]["enum"]
    return "" if right and isinstance(value["large"], bool) else f"a JSON schema gave what it forbids: {text[:80]!r}"
