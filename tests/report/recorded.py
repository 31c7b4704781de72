"""What a host keeps of four swaps, written where its agent writes it; GPU samples are made with a fixed seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kernelswap.agent.host import Folders
from kernelswap.agent.verify import gates
from kernelswap.measured import DriftVerdict, Point, Run, ThroughputResult, ThroughputVerdict
from kernelswap.protocol import Cause, Event, HostFault, Plan, Report, Request, Resolved, StepResult, encode
from kernelswap.traces import GPU_COLUMNS, SERVER_COLUMNS

LOGS = Path(__file__).parent.parent / "agent" / "logs"
OLD, NEW = "cutlass-1a2b3c4d5e", "trtllm-9f8e7d6c5b"
START = 1764470000.0
COMMAND = "pyinfra inventory/gpu.py deploy.py --profile trtllm --reason 'trtllm MoE runner, see OPS-1412'"
HEADING = ",".join(GPU_COLUMNS.values())


def request(**changes: object) -> Request:
    return replace(
        Request(
            swap="20251130T023320Z-7c1e",
            instance="main",
            action="converge",
            release=NEW,
            who="ada@ops-desk",
            reason="trtllm MoE runner, see OPS-1412",
            host="gpu-01",
            command=COMMAND,
        ),
        **changes,
    )


def plan(release: str, **flags: str) -> Plan:
    profile = release.partition("-")[0]
    flags = {"tp-size": "8", "mem-fraction-static": "0.90", "kv-cache-dtype": "fp8_e4m3", **flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    return Plan(
        instance="main", release=release, profile=profile, model="glm5", python="/opt/sglang/bin/python",
        argv=("-m", "sglang.launch_server", *words),
        environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}, user="sglang", model_path="/srv/models/GLM-5-NVFP4",
        served_name="glm5", address="0.0.0.0", port=30000, flags=flags,
    )  # fmt: skip


PLANS = (
    plan(OLD, **{"moe-runner-backend": "flashinfer_cutlass", "cuda-graph-max-bs": "128"}),
    plan(NEW, **{"moe-runner-backend": "flashinfer_trtllm"}),
)
RESOLVED = (
    Resolved(OLD, "0.5.23", {"moe_runner_backend": '"flashinfer_cutlass"', "attention_backend": '"flashinfer"',
                             "cuda_graph_max_bs": "128", "chunked_prefill_size": "8192"}),
    Resolved(NEW, "0.5.23", {"moe_runner_backend": '"flashinfer_trtllm"', "attention_backend": '"flashinfer"',
                             "cuda_graph_max_bs": "256", "chunked_prefill_size": "16384"}),
)  # fmt: skip


def result(release: str, rates: dict[int, float], slower: float = 1.0, seed: int = 1) -> ThroughputResult:
    """Three runs at each concurrency, about `rates` output tokens per second."""
    noise = random.Random(seed)  # noqa: S311
    points = []
    for concurrency, rate in rates.items():
        runs = tuple(_run(concurrency, rate * noise.uniform(0.985, 1.015), slower, noise) for _ in range(3))
        found = sorted(run.output_tok_s for run in runs)
        points.append(Point(concurrency, runs, found[1], found[0], found[2], (found[2] - found[0]) / found[1]))
    return ThroughputResult(release, "f3a9", tuple(points))


def _run(concurrency: int, rate: float, slower: float, noise: random.Random) -> Run:
    requests, output = concurrency * 8, concurrency * 8 * 512
    seconds = output / rate
    itl = concurrency / rate * 1000 * 0.95
    ttft = (180 + 9 * concurrency) * slower * noise.uniform(0.95, 1.05)

    def around(middle: float, far: float) -> dict[str, float]:
        return {
            "median": round(middle, 2),
            "p90": round(middle * (1 + far), 2),
            "p99": round(middle * (1 + 2 * far), 2),
        }

    return Run(
        concurrency, requests, 0, seconds, requests * 1024, output, requests * 1024 / seconds, rate,
        around(ttft, 0.4), around(itl, 0.15), around(ttft + itl * 512, 0.1), cached_tokens=0,
    )  # fmt: skip


STEPS = {
    "preflight": (6.2, "1 server(s) to replace"),
    "drain": (2.1, "0 request(s) running"),
    "activate": (0.4, f"{NEW} under /run"),
    "stop": (11.4, "sglang-main.service"),
    "clean": (3.3, "no SGLang process, no listener on port 30000, 8 GPU(s) idle"),
    "start": (0.2, "main pid 41288"),
    "ready": (268.0, "8 schedulers; weights 171 s, graphs 64 s"),
    "smoke": (9.7, "11 checks"),
    "drift": (14.8, "98.4 % of 6144 tokens as before"),
    "throughput": (151.0, "1312.4 output tok/s at 64"),
    "soak": (30.0, "healthy for 30 s"),
    "open": (0.1, "reachable from outside"),
    "commit": (0.3, "enabled"),
}
BACK = {"< stop": 8.1, "< clean": 4.0, "< start": 0.2, "< ready": 241.0, "< smoke": 6.0, "< open": 0.1}


def steps(until: str = "commit", failed: str = "", numbers: dict[str, float] | None = None) -> tuple[StepResult, ...]:
    """Those of a swap up to a step, which has failed if `failed` says why, and then the way back."""
    done = []
    for name, (seconds, detail) in STEPS.items():
        ok = name != until or not failed
        done.append(StepResult(name, seconds, ok, detail if ok else failed, (numbers or {}) if name == until else {}))
        if name == until:
            break
    back = BACK if failed and until not in ("preflight", "drain") else {}
    return (*done, *(StepResult(name, seconds, True) for name, seconds in back.items()))


def report(outcome: str, done: Sequence[StepResult], **changes: object) -> Report:
    seconds = sum(step.seconds for step in done)
    evidence = f"/var/lib/kernelswap/main/swaps/{request().swap}"
    return replace(
        Report(request(), outcome, START, START + seconds, previous=OLD, evidence=evidence, steps=tuple(done)),
        **changes,
    )


def events(told: Report, notes: Sequence[str] = ()) -> Iterator[str]:
    at = told.started
    for step in told.steps:
        yield encode(Event(at, step.name, "begin"))
        at += step.seconds
        yield encode(Event(at, step.name, "end" if step.ok else "failed", step.detail, step.seconds))
    for note in notes:
        yield encode(Event(at, "ready", "note", note))


PHASES = [("warm-up", 12.0)] + [
    (f"run c={c} {i}/3", s) for c, s in ((1, 9.0), (16, 14.0), (64, 20.0)) for i in (1, 2, 3)
]


def gpu_csv(begin: float, gpus: int = 8, slow: int | None = 5, seed: int = 7, every: float = 1.0) -> Iterator[str]:
    """8 GPUs of 600 W under the ladder; one runs colder and slower, as a rank that waits for nobody."""
    noise = random.Random(seed)  # noqa: S311
    yield HEADING
    at = begin
    for name, seconds in [*PHASES, ("soak", 30.0)]:
        load = {"warm": 0.5, "soak": 0.35}.get(name[:4], 0.45 if "c=1 " in name else 0.7 if "c=16" in name else 0.93)
        for second in range(int(seconds / every)):
            ramp = min(1.0, 0.3 + second * every / 3)
            for gpu in range(gpus):
                own = load * ramp * noise.uniform(0.94, 1.04) * (0.72 if gpu == slow else 1)
                clock = 2370 - 180 * own - (420 if gpu == slow else 0) + noise.uniform(-15, 15)
                row = dict.fromkeys(GPU_COLUMNS, "") | {
                    "time": f"{at:.3f}", "phase": name, "index": gpu, "uuid": f"GPU-{gpu}", "name": "NVIDIA B200",
                    "utilization": round(min(100, 103 * own)), "power": round(90 + 480 * own, 1), "power_limit": 600,
                    "sm_clock": round(clock), "sm_clock_max": 2430, "reasons": hex(0x20 if gpu == slow else 0),
                    "memory_used": round(168_000 + 900 * own), "memory_total": 183_359,
                    "temperature": round(41 + 33 * own),
                }  # fmt: skip
                if gpu == 7 and not second:
                    row["power"] = ""  # not known, which is not 0
                yield ",".join(map(str, row.values()))
            at += every


def metrics_csv(begin: float) -> Iterator[str]:
    """The server's own counters under the same load."""
    yield ",".join(SERVER_COLUMNS)
    at = begin
    for name, seconds in PHASES:
        concurrency = int(name.partition("c=")[2].split()[0]) if "c=" in name else 4
        for second in range(int(seconds)):
            busy = concurrency if second < seconds - 1 else concurrency // 2
            yield f"{at + second:.3f},{name},{busy},{max(0, busy - 48)},{0.008 * busy:.3f},0,{20 * busy},"
        at += seconds


def bench_jsonl(measured: ThroughputResult) -> Iterator[str]:
    for point in measured.points:
        for i, run in enumerate(point.runs, 1):
            numbers = {
                "output_throughput": run.output_tok_s, "completed": run.completed, "concurrency": run.concurrency,
                "total_output_tokens": run.output_tokens, "median_itl_ms": run.itl["median"],
                "phase": f"run c={run.concurrency} {i}/3",
            }  # fmt: skip
            yield json.dumps(numbers)


def committed(folder: Path) -> Report:
    told = report(
        "committed", steps(), serving=NEW, notes=("NVIDIA driver 580.65 is older than SGLang's CUDA 13 asks",)
    )
    was, now = {1: 71.0, 16: 512.0, 64: 1057.0}, {1: 74.5, 16: 598.0, 64: 1312.0}
    before, after = result(OLD, was, 1.1, seed=2), result(NEW, now, seed=3)
    difference = gates.difference(after.points[-1], before.points[-1])
    throughput = ThroughputVerdict(
        "pass", "no slower than the known-good at any concurrency", after, before, difference, 0.031, 900, 64
    )
    drift = DriftVerdict(
        "pass", "as the known-good within the limits", NEW, OLD, 25, 1180, equal=0.984, first_divergence=11,
        mean_logprob=0.0121, worst_prompt=0.084, worst_logprob=0.284, kl=0.00093,
        limits={"equal": 0.5, "mean_logprob": 0.1, "worst_prompt": 0.5, "kl": 0.05},
        noise={"equal": 0.991, "mean_logprob": 0.0083, "worst_prompt": 0.03, "worst_logprob": 0.19, "kl": 0.0006},
    )  # fmt: skip
    begin = START + sum(step.seconds for step in told.steps[:9])
    _write(folder, "throughput.json", encode(throughput))
    _write(folder, "drift.json", encode(drift))
    _write(folder, "gpu.csv", *gpu_csv(begin))
    _write(folder, "metrics.csv", *metrics_csv(begin))
    _write(folder, "bench.jsonl", *bench_jsonl(after))
    _write(folder, "events.jsonl", *events(told, ["the candidate asks for 8.4 GiB more KV cache"]))
    return told


def throughput(folder: Path) -> Report:
    """14.9 % slower than the known-good: rolled back."""
    why = "900.1 output tok/s at 64 concurrent requests, 14.9 % below cutlass-1a2b3c4d5e; noise explains 3.1 %"
    told = report(
        "rolled-back",
        steps("throughput", failed=why),
        serving=OLD,
        cause=Cause(
            why, "throughput.json", "try another backend, or lower verify.throughput.margin", "throughput", "release"
        ),
    )
    before, after = result(OLD, {1: 71.0, 64: 1057.0}, seed=2), result(NEW, {1: 69.8, 64: 900.0}, 1.4, seed=5)
    difference = gates.difference(after.points[-1], before.points[-1])
    verdict = ThroughputVerdict("fail", why, after, before, difference, 0.031, concurrency=64)
    _write(folder, "throughput.json", encode(verdict))
    _write(folder, "gpu.csv", *gpu_csv(START + 301, gpus=2, slow=None))
    _write(folder, "events.jsonl", *events(told))
    return told


def crash(folder: Path) -> Report:
    lines = (LOGS / "flashinfer_missing.log").read_text().splitlines()[1:]
    what = "ModuleNotFoundError: No module named 'flashinfer'"
    where = f"/var/lib/kernelswap/main/swaps/{request().swap}/server.log:{len(lines) - 4}"
    told = report(
        "rolled-back",
        steps("ready", failed=what),
        serving=OLD,
        cause=Cause(
            what,
            where,
            "install flashinfer into /opt/sglang, or take moe-runner-backend triton",
            "flashinfer-missing",
            "release",
        ),
    )
    _write(folder, "server.log", *lines)
    _write(folder, "events.jsonl", *events(told))
    return told


def refused(folder: Path) -> Report:
    faults = (
        HostFault("port 30000 is held by nginx (pid 812, unit nginx.service)", "stop it, or set another port"),
        HostFault("GPU 3: 41213 MiB are held by python3 (pid 5120 of bob)", "end it, or `end-foreign: true`"),
    )
    told = report(
        "refused",
        steps("preflight", failed="2 faults"),
        cause=Cause(
            "; ".join(map(str, faults)),
            f"/etc/kernelswap/main/releases/{NEW}",
            "correct these and run the same command again",
            "preflight",
            faults=faults,
        ),
        serving=OLD,
    )
    _write(folder, "events.jsonl", *events(told))
    return told


CASES: dict[str, Callable[[Path], Report]] = {f.__name__: f for f in (committed, throughput, crash, refused)}


def host(root: Path, case: str) -> Folders:
    """A host's files after a swap."""
    folders = Folders("main", root)
    told = CASES[case](folders.evidence(request().swap))
    keep(folders, told)
    for item in PLANS:
        _write(folders.release(item.release), "plan.json", encode(item))
    for found in RESOLVED:
        _write(folders.resolved(found.release).parent, f"{found.release}.json", encode(found))
    return folders


def keep(folders: Folders, told: Report) -> None:
    """Into the history and the evidence."""
    folders.state.mkdir(parents=True, exist_ok=True)
    with folders.history.open("a") as file:
        file.write(encode(told) + "\n")
    _write(folders.evidence(told.request.swap), "report.json", encode(told))


def _write(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
