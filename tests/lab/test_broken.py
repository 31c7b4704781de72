"""The real SGLang, broken on purpose by lab/faulty: the verification sees each fault, and none in a sound server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import pytest
from labhost import ROOT, Host, Lab
from project import Project, release, unused
from test_real import SGLANG

from kernelswap.agent.client import Client
from kernelswap.agent.verify import drift, smoke, soak
from kernelswap.measured import ACCURACY_FILE, DRIFT_FILE, AccuracyVerdict, Drift, DriftVerdict, Scored
from kernelswap.protocol import Answer, DriftLimits, Plan, Report, Timeouts, Verify, decode

pytestmark = pytest.mark.xdist_group("broken")

T = TypeVar("T")
PORT = 31000
UNIT = "broken"
VERIFICATION = ("smoke", "drift", "accuracy", "throughput", "soak")
ANSWERS = (
    Answer("What is 2+2?", r"\b4\b", 16),
    Answer("What is the capital of France?", "Paris", 16),
    Answer("What is the capital of 日本?", "東京", 16),
)
# Fault -> what finds it, among others.
SMOKE = {
    "nan": "tokens: ",
    "nan-logprobs": "logprobs are not finite",
    "corrupt-token": "are not what the model chose",
    "repeat": "texts are garbled, most of them the same few letters over and over",
    "salad": "is not that of its tokens",
    "replacement": "is not that of its tokens",
    "multibyte": "grammar: a grammar that allows only",
    "empty": "completion: the text is empty",
    "one-token": "tokens were asked for, 1 came",
    "no-generation": "no tokens came back",
    "canned": "they were not computed",
    "stream-differs": "completion: streamed",
}


@dataclass(frozen=True)
class Broken:
    """A server whose faults can be changed while it runs."""

    host: Host
    client: Client
    plan: Plan

    def break_by(self, fault: str) -> None:
        self.host.write("/run/lab-fault", fault)

    def smoke(self) -> str:
        """All faults that the smoke finds."""
        return "; ".join(f"{name}: {fault}" for name, fault in smoke.ask(self.plan, self.client).faults.items())


@pytest.fixture(scope="module")
def host(lab: Lab) -> Host:
    return unused(lab)


@pytest.fixture(scope="module")
def broken(host: Host) -> Iterator[Broken]:
    environment = {
        "PYTHONPATH": "/opt/faulty", "LAB_FAULT": "@/run/lab-fault", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "HOME": "/tmp", "SGLANG_CACHE_DIR": "/tmp/sglang",
    }  # fmt: skip
    words = SGLANG.replace("30000", str(PORT)).replace("grammar-backend none", "grammar-backend xgrammar")
    settings = " ".join(f"--setenv={name}={value}" for name, value in environment.items())
    host.run(f"systemd-run --collect --unit={UNIT} {settings} {words} --sleep-on-idle --random-seed 0")
    client = Client(f"http://{host.address}:{PORT}", "tiny")
    until = time.monotonic() + 180
    while client.status("/ready") != 200:
        assert time.monotonic() < until, host.output(f"journalctl -u {UNIT} -o cat | tail -20")
        time.sleep(0.5)
    verify, timeouts = Verify(answers=ANSWERS, min_healthy=1), Timeouts(smoke=120, soak=120)
    flags = {"max-running-requests": "8"}
    plan = Plan(
        "main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "tiny", host.address, PORT,
        flags=flags, verify=verify, timeouts=timeouts,
    )  # fmt: skip
    yield Broken(host, client, plan)
    host.run(f"systemctl kill --signal=KILL {UNIT}", check=False)


def test_a_sound_server(broken: Broken) -> None:
    broken.break_by("none")
    assert broken.smoke() == ""
    traffic = soak.run(broken.plan, broken.client)
    assert traffic.faults == []
    assert traffic.numbers["requests"] >= soak.REQUESTS


@pytest.mark.parametrize("fault", SMOKE)
def test_the_smoke_finds(fault: str, broken: Broken) -> None:
    broken.break_by(fault)
    assert SMOKE[fault] in broken.smoke()


def test_the_soak_finds_a_server_that_hangs(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PATIENCE", 4)
    broken.break_by("hang-after-100")
    traffic = soak.run(broken.plan, broken.client)
    assert "timed out" in traffic.faults[0]
    assert traffic.numbers["requests"] == 100


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["corrupt-token", "corrupt-logits", "stream-differs"])
def test_what_happens_by_chance_is_found_each_time(fault: str, broken: Broken) -> None:
    broken.break_by(fault)
    assert [number for number in range(20) if not broken.smoke()] == []


@pytest.mark.exhaustive
def test_a_sound_server_passes_20_times(broken: Broken) -> None:
    broken.break_by("none")
    assert [broken.smoke() for _ in range(20)] == [""] * 20
    assert [soak.run(broken.plan, broken.client).faults for _ in range(20)] == [[]] * 20


DAMAGED = ("permuted-expert", "exchanged-experts", "zero-router", "scaled-norm")
HARMLESS = ("scaled-expert", "swapped-rare-tokens")


def drifted(broken: Broken, fault: str, known: tuple[Scored, ...]) -> Drift:
    """How far the server's answers are from the known ones once it has loaded its weights anew, with a fault."""
    broken.break_by(fault)
    body = {"model_path": "/srv/models/tiny", "flush_cache": True}
    assert broken.client.post("/update_weights_from_disk", body, 60)["success"]
    found = drift.compare(known, asked(broken))
    print(fault, found)
    return found


def asked(broken: Broken, at_once: int = drift.AT_ONCE) -> tuple[Scored, ...]:
    return drift.answers(broken.client, *drift.prompts(), time.monotonic() + 60, 60, at_once)


def beyond(found: Drift) -> list[str]:
    """The figures beyond the limits of a server without noise."""
    return drift.excess(found, drift.allowance(DriftLimits(), Drift(1, 1.0, None, 0, 0, 0, 0)))


def test_drift_finds_damaged_weights(broken: Broken) -> None:
    broken.break_by("none")
    known = asked(broken)
    for fault in ("permuted-expert", "zero-router"):
        assert beyond(drifted(broken, fault, known)) != []
    again = drifted(broken, "none", known)
    assert beyond(again) == []
    assert again.equal == 1


@pytest.mark.exhaustive
def test_drift_of_the_same_weights_and_of_others(broken: Broken) -> None:
    broken.break_by("none")
    known = asked(broken)
    for number in range(20):
        assert beyond(drift.compare(known, asked(broken, at_once=1 + number % 8))) == []
    for fault in (*DAMAGED, *HARMLESS):
        assert (beyond(drifted(broken, fault, known)) == []) == (fault in HARMLESS), fault
    assert drifted(broken, "none", known).equal == 1


@pytest.fixture(scope="module")
def project(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Project:
    # What the tests above ask is no server of ours.
    host.run(f"systemctl kill --signal=KILL {UNIT}; while systemctl is-active {UNIT}; do sleep 0.2; done", check=False)
    project = Project(tmp_path_factory.mktemp("ops"), [(host, {"model": "tiny"})]).write()
    folder = project.folder / "inventory"
    for kind, name in (("models", "tiny"), ("profiles", "torch-native")):
        (folder / kind / f"{name}.yaml").symlink_to(ROOT / "inventory" / kind / f"{name}.yaml")
    return project


def swap(project: Project, fault: str = "") -> str:
    faulty = f"environment: {{PYTHONPATH: /opt/faulty, LAB_FAULT: {fault}}}" if fault else ""
    project.profile(f"real-{fault or 'sound'}", f"extends: torch-native\n{faulty}\n")
    return project.deploy("--profile", f"real-{fault or 'sound'}", "-y").output


@pytest.mark.exhaustive
def test_whole_swaps(project: Project, host: Host) -> None:
    assert "committed" in swap(project)
    good = release(host)
    for fault, step, words in (
        ("corrupt-token", "smoke", "are not what the model chose"),
        ("multibyte", "smoke", "expected /東京/"),
        ("hang-after-100", "drift", "timed out"),  # which asks the 101st request
    ):
        output = swap(project, fault)
        for expected in ("ROLLED BACK", f"step {step}", words, f"{good} serves again, verified"):
            assert expected in output
    assert release(host) == good


@pytest.mark.exhaustive
def test_twenty_clean_swaps_are_committed_and_each_is_verified_in_90_seconds(project: Project, host: Host) -> None:
    for number in range(21):
        project.profile("clean", f"extends: torch-native\nflags: {{random-seed: {number}}}\n")
        assert "committed" in project.deploy("--profile", "clean", "-y").output
        if number:  # the first of a host measures what serves already, too
            steps = evidence(host, "report.json", Report).steps
            took = {step.name: step.seconds for step in steps if step.name in VERIFICATION}
            print(took, sum(took.values()))
            assert sum(took.values()) < 90


@pytest.mark.exhaustive
def test_drift_of_whole_swaps(project: Project, host: Host) -> None:
    """Each release against the one before it: other numerics pass, a backend that loads weights wrongly does not."""
    asked = [
        f'{{"question": "What is {n}+{m}?", "answer": "{n}+{m} is {n + m}. #### {n + m}"}}'
        for n in range(2)
        for m in range(10)
    ]
    host.write("/srv/questions.jsonl", "\n".join(asked))
    accuracy = "accuracy: {file: /srv/questions.jsonl, questions: 20, shots: 2}"
    # On a CPU float32 is the faster one.
    verify = f"verify: {{{accuracy}, throughput: null, answers: [], min-healthy: 1}}"
    for name, more in (
        ("bfloat16", ""),
        ("float32", "flags: {dtype: float32}"),
        ("again", "flags: {random-seed: 1}"),
        ("permuted-expert", "environment: {PYTHONPATH: /opt/faulty, LAB_FAULT: permuted-expert}"),
        ("zero-router", "environment: {PYTHONPATH: /opt/faulty, LAB_FAULT: zero-router}"),
    ):
        project.profile(name, f"extends: torch-native\n{more}\n{verify}\n")
    for profile, words in (("bfloat16", "drift "), ("float32", "KL "), ("again", "KL ")):
        output = project.deploy("--profile", profile, "-y").output
        assert "committed" in output
        assert words in output
    assert evidence(host, DRIFT_FILE, DriftVerdict).kl
    score = evidence(host, ACCURACY_FILE, AccuracyVerdict)
    assert (score.verdict, len(score.scores)) == ("pass", 3)
    assert score.mean > 0
    good = release(host)
    for fault in ("permuted-expert", "zero-router"):
        output = project.deploy("--profile", fault, "-y").output
        for expected in ("ROLLED BACK", "step drift", "KL", "limit 0.05", f"{good} serves again, verified"):
            assert expected in output
        verdict = evidence(host, DRIFT_FILE, DriftVerdict)
        assert (verdict.verdict, verdict.against) == ("fail", good)
    assert release(host) == good


def evidence(host: Host, name: str, kind: type[T]) -> T:
    """Of the newest swap."""
    return decode(kind, host.output(f"cd /var/lib/kernelswap/main/swaps; cat $(ls | tail -1)/{name}"))
