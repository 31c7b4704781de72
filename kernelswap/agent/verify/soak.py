"""Light traffic for a while before a server is committed: some hang or fall only after the first hundred requests."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Dict, List, Tuple

from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import answers, health, smoke
from kernelswap.protocol import Cause, Plan

REQUESTS = 160  # at least. Source: sglang#22779, requests hang after 80 to 140 completions while /health says 200
WIDTH = 4  # at once
TOKENS = 8  # of each
PAUSE = 0.2  # seconds of each worker between requests, once there have been enough
PATIENCE = 15.0  # seconds for an answer, at least
SLOWER = 50  # times the median: no answer comes any more
OUTLIER = 10  # times the median, and a second: told


@dataclass
class Traffic:
    """What the requests have come to. seconds: of each that was answered."""

    seconds: List[float] = field(default_factory=list)
    faults: List[str] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    @property
    def patience(self) -> float:
        """How long to wait for an answer: it must be past doubt that it does not come."""
        return max(PATIENCE, SLOWER * self.median) if len(self.seconds) >= WIDTH else 4 * PATIENCE

    @property
    def outliers(self) -> int:
        return sum(seconds > max(1.0, OUTLIER * self.median) for seconds in self.seconds)

    @property
    def worst(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def numbers(self) -> Dict[str, float]:
        return {
            "requests": float(len(self.seconds)),
            "median_ms": round(1000 * self.median, 1),
            "worst_ms": round(1000 * self.worst, 1),
            "outliers": float(self.outliers),
        }


def check(plan: Plan, server: Client, since: float) -> Tuple[str, Dict[str, float]]:
    """What was seen, and in figures. since: the server's start, epoch seconds. Raises Failed with all faults."""
    traffic = run(plan, server)
    faults = traffic.faults + health.faults(plan, since)
    if faults:
        todo = "the backend does not last: choose another; raise timeouts.soak if the model is only slow"
        raise Failed(Cause("; ".join(faults), f"journalctl -u {plan.unit}", todo, "soak", blame="release"))
    slow = f", {traffic.outliers} slow one(s), the worst {traffic.worst:.1f} s" if traffic.outliers else ""
    seen = f"{len(traffic.seconds)} requests, {1000 * traffic.median:.0f} ms each{slow}"
    return seen, traffic.numbers


def run(plan: Plan, server: Client) -> Traffic:
    """At least REQUESTS requests, and as many more as min_healthy has time for; ends at the first fault."""
    traffic = Traffic()
    begin = time.monotonic()
    limit = begin + plan.verify.min_healthy + plan.timeouts.soak
    texts = smoke.prompts()["continue"] + smoke.prompts()["scripts"]

    def work() -> None:
        while not traffic.faults:
            with traffic.lock:
                traffic.sent += 1
                number = traffic.sent
            if number > REQUESTS and time.monotonic() - begin >= plan.verify.min_healthy:
                return
            if time.monotonic() >= limit:
                traffic.faults.append(f"{number - 1} of {REQUESTS} requests within {plan.timeouts.soak:g} s")
                return
            _ask(server, number, texts[number % len(texts)], traffic)
            if number > REQUESTS:
                time.sleep(PAUSE)

    with ThreadPoolExecutor(WIDTH) as pool:
        for done in [pool.submit(work) for _ in range(WIDTH)]:
            done.result()
    traffic.faults[2:] = []  # the others wait for the same
    return traffic


def _ask(server: Client, number: int, text: str, traffic: Traffic) -> None:
    try:
        answer = server.generate(smoke.unique(text), TOKENS, traffic.patience, answers.TOP)
    except Unanswered as error:
        traffic.faults.append(f"request {number}: {error}")
        return
    traffic.seconds.append(answer.seconds)
    traffic.faults += [f"request {number}: {fault}" for fault in answers.faults(answer, TOKENS)]
