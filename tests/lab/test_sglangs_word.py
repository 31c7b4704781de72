"""What a host's SGLang says of a command line is known before anything stops. The GPUs are NVML's simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from labhost import Host, Lab
from project import MODEL, Project, main_pid, unused

from kernelswap.agent import engine, preflight
from kernelswap.protocol import Gpu, Plan, decode

HERE = Path(__file__).parent
MLA = "/srv/models/mla"
CONFIG = (HERE / "mla_config.json").read_text()
REAL = """
engine: {python: /opt/sglang/bin/python}
environment: {PYTHONPATH: /opt/sglang/shim, HF_HUB_OFFLINE: 1, OMP_NUM_THREADS: 1}
timeouts: {ready: 60}
"""
ARCHITECTURES = {"sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}
CASES = json.loads((HERE / "sglangs_word.json").read_text())


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Host]:
    """A host with two models' folders: the lab's tiny one with the configuration of another architecture."""
    host = unused(lab)
    host.run(f"cp -r /srv/models/tiny {MLA}")
    host.write(f"{MLA}/config.json", CONFIG)
    yield host
    host.run("rm -rf /run/nvml-sim")


def test_the_verdict_is_sglangs_own(host: Host) -> None:
    """Every command line on every architecture, asked by our probe, and of SGLang itself."""
    asked = [
        (name, architecture, ["--model-path", MLA, "--device", "cuda", *case["words"]])
        for name, case in CASES.items()
        for architecture in ARCHITECTURES
    ]
    question = {"probe": engine.PROBE, "cases": [[ARCHITECTURES[where], words] for _, where, words in asked]}
    host.write("/root/sglangs_word.py", (HERE / "sglangs_word.py").read_text())
    host.write("/root/question.json", json.dumps(question))
    command = "env PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 /opt/sglang/bin/python"
    answers = json.loads(host.output(f"{command} /root/sglangs_word.py </root/question.json 2>/root/log", timeout=600))
    for (name, architecture, words), (probed, direct) in zip(asked, answers, strict=True):
        case = CASES[name]
        said = decode(engine.Answer, json.dumps(probed))
        faults = preflight.engine_faults(plan(words), said)
        where = f"{name} on {architecture}: {said.refusal} {said.unknown}"
        assert (faults == []) == direct["accepted"] == (architecture in case["accepted"]), where
        if direct["accepted"]:
            assert said.resolved, where
            assert decided(said.values) == decided(direct["values"]), where
        else:
            assert said.refusal, where
            assert said.refusal in " ".join(direct["says"].split()), where
            assert case["names"] in faults[0].what, where
        gpu = Gpu(0, capability="{}.{}".format(*ARCHITECTURES[architecture]))
        warned = preflight.backend_notes(plan(words), said, [gpu])
        assert [bool(warned)] == [architecture in case["warned"]], f"{where}: {warned}"


def plan(words: list[str]) -> Plan:
    flags = dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))
    argv = ("-m", "sglang.launch_server", *words)
    return Plan("main", "b-2", "b", "m", "/p", argv, {}, "root", MLA, "m", "::", 30000, flags=flags)


def decided(values: dict[str, str]) -> dict[str, Any]:
    """Without what every resolution draws anew, and SGLang's own bookkeeping."""
    return {name: value for name, value in values.items() if name != "random_seed" and not name.startswith("_")}


def test_a_refusal_comes_before_anything_stops(host: Host, tmp_path: Path) -> None:
    project = Project(tmp_path, [(host, {})]).write()
    project.model(MODEL.replace("/srv/models/tiny", MLA).replace("device: cpu", "device: cuda"))
    for name, case in CASES.items():
        project.profile(name, f"{REAL}\nflags: {json.dumps(plan(case['words']).flags)}")
    taken = json.dumps(plan(CASES["trtllm_mla"]["words"]).flags)
    project.profile("too_big", f"{REAL}\nflags: {taken}\nrequires: {{memory: 999999}}")
    project.profile("warned", "flags: {moe-runner-backend: flashinfer_trtllm}")
    assert project.deploy("-y").code == 0
    pid = main_pid(host)

    # Of the architecture, by the literal command.
    refused = project.deploy("--profile", "cutedsl_mla", "-y")
    assert refused.code == 1
    assert "CuteDSL MLA backend is only supported on Blackwell GPUs (SM100)" in refused
    assert "(--attention-backend cutedsl_mla)" in refused
    assert main_pid(host) == pid

    # What SGLang takes is known when it is asked again; these GPUs have not enough memory, so nothing stops.
    assert "999999" in project.deploy("--profile", "too_big", "-y")
    cold = seconds(host)
    assert "999999" in project.deploy("--profile", "too_big", "-y")
    warm = seconds(host)
    print(f"the preflight took {cold:.2f} s, and {warm:.2f} s when it was asked again")
    assert warm < cold / 2
    assert host.output("ls /var/lib/kernelswap/main/answers | wc -l") == "2"  # and the stand-in's

    # Other GPUs are another question.
    host.write("/run/nvml-sim/cc", "9.0\n")
    refused = project.deploy("--profile", "trtllm_mla", "-y")
    assert refused.code == 1
    assert "TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x)" in refused
    assert main_pid(host) == pid

    # What SGLang takes and the GPU cannot do is told, and bars nothing.
    host.run("rm /run/nvml-sim/cc")
    warned = project.deploy("--profile", "warned", "-y")
    assert warned.code == 0
    note = "moe-runner-backend: SGLang takes flashinfer_trtllm on SM120"
    assert warned.output.index(note) < warned.output.index("] stop  ")
    assert note in project.kernelswap("history", host.name, "--inventory", "inventory/hosts.py")
    resolved = json.loads(host.output("cat /var/lib/kernelswap/main/resolved/warned-*.json"))
    assert resolved["served"]
    assert resolved["values"]["moe_runner_backend"] == '"flashinfer_trtllm"'
    assert "api_key" not in resolved["values"]


def seconds(host: Host) -> float:
    """How long the last swap's preflight took."""
    folder = "/var/lib/kernelswap/main/swaps"
    report = json.loads(host.output(f"cat {folder}/$(ls -t {folder} | head -1)/report.json"))
    return float(report["steps"][0]["seconds"])
