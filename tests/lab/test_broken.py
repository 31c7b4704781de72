"""The real SGLang, broken on purpose by lab/faulty: the verification sees each fault, and none in a sound server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from labhost import ROOT, Host, Lab
from project import Project, release, unused
from test_real import SGLANG

from kernelswap.agent.client import Client
from kernelswap.agent.verify import smoke, soak
from kernelswap.protocol import Answer, Plan, Timeouts, Verify

pytestmark = pytest.mark.xdist_group("broken")

PORT = 31000
UNIT = "broken"
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


@pytest.fixture(scope="module")
def project(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Project:
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
        ("hang-after-100", "soak", "timed out"),
    ):
        output = swap(project, fault)
        for expected in ("ROLLED BACK", f"step {step}", words, f"{good} serves again, verified"):
            assert expected in output
    assert release(host) == good
