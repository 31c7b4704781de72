"""The stand-in of SGLang's serving benchmark: the same options and output keys, real requests, real clocks."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Measured:
    """One request: its times in seconds. tokens: when each came, counted from its start; none if it failed."""

    end: float
    tokens: tuple[float, ...] = ()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("backend", "host", "model", "served-model-name", "dataset-name", "output-file"):
        parser.add_argument(f"--{name}", default="")
    for name in ("port", "random-input-len", "random-output-len", "num-prompts", "max-concurrency", "seed"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--random-range-ratio", type=float, default=0.0)
    parser.add_argument("--warmup-requests", type=int, default=1)
    for name in ("--disable-tqdm", "--tokenize-prompt", "--cache-report"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


def ask(args: argparse.Namespace, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(args.host, args.port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
    response = connection.getresponse()
    if response.status != 200:
        raise http.client.HTTPException(f"{path}: HTTP {response.status}")
    return response


def measure(args: argparse.Namespace, prompt: list[int]) -> Measured:
    sampling = {"temperature": 0.0, "max_new_tokens": args.random_output_len, "ignore_eos": True}
    start = time.perf_counter()
    tokens: list[float] = []
    finished = False
    try:
        for line in ask(args, "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}):
            finished = finished or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                tokens.append(time.perf_counter() - start)
    except (OSError, http.client.HTTPException):
        finished = False
    return Measured(time.perf_counter() - start, tuple(tokens) if finished else ())


def spread(name: str, values: list[float]) -> dict[str, float]:
    found = sorted(1000 * value for value in values) or [0.0]
    cut = {f"p{q}_{name}_ms": found[min(len(found) - 1, len(found) * q // 100)] for q in (90, 95, 99)}
    mean, median, std = statistics.fmean(found), statistics.median(found), statistics.pstdev(found)
    return {f"mean_{name}_ms": mean, f"median_{name}_ms": median, f"std_{name}_ms": std, **cut}


def gaps(times: tuple[float, ...]) -> list[float]:
    return [times[index + 1] - times[index] for index in range(len(times) - 1)]


def main() -> None:
    args = options()
    dice = random.Random(args.seed)  # noqa: S311
    prompts = [[dice.randrange(1000) for _ in range(args.random_input_len)] for _ in range(args.num_prompts)]
    if args.warmup_requests and not measure(args, prompts[0]).tokens:
        raise SystemExit("Warmup failed - Please make sure benchmark arguments are correctly specified")
    start = time.perf_counter()
    with ThreadPoolExecutor(args.max_concurrency) as pool:
        done = list(pool.map(lambda prompt: measure(args, prompt), prompts))
    duration = time.perf_counter() - start
    good = [item for item in done if item.tokens]
    sent, got = len(good) * args.random_input_len, sum(len(item.tokens) for item in good)
    result = {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": float("inf"),
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "server_info": server_info(args),
        "duration": duration,
        "completed": len(good),
        "total_input_tokens": sent,
        "total_output_tokens": got,
        "request_throughput": len(good) / duration,
        "input_throughput": sent / duration,
        "output_throughput": got / duration,
        "total_throughput": (sent + got) / duration,
        "concurrency": sum(item.end for item in good) / duration,
        **spread("e2e_latency", [item.end for item in good]),
        **spread("ttft", [item.tokens[0] for item in good]),
        **spread("tpot", [(item.end - item.tokens[0]) / max(1, len(item.tokens) - 1) for item in good]),
        **spread("itl", [gap for item in good for gap in gaps(item.tokens)]),
    }
    with Path(args.output_file).open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def server_info(args: argparse.Namespace) -> Any:
    try:
        return json.load(ask(args, "/server_info"))
    except (OSError, http.client.HTTPException):
        return None


if __name__ == "__main__":
    main()
