"""A model that is not whole and GPUs that are not what a release requires: refused, and what serves goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from labhost import Host, Lab
from project import Project, main_pid, release, unused

from kernelswap.agent.engine import MOE_PROBE
from kernelswap.agent.moe_tuning import Sought
from kernelswap.protocol import decode

pytestmark = pytest.mark.xdist_group("requirements")

# The lab's model in three shards, as a hub would have it.
SPLIT = r"""
import json, os, struct
os.chdir("/srv/models/tiny")
with open("model.safetensors", "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    data = file.read()
header.pop("__metadata__", None)
names, index = sorted(header), {}
for shard in range(3):
    mine, body, name = {}, b"", f"model-0000{shard + 1}-of-00003.safetensors"
    for tensor in names[shard::3]:
        begin, end = header[tensor]["data_offsets"]
        mine[tensor] = {**header[tensor], "data_offsets": [len(body), len(body) + end - begin]}
        body += data[begin:end]
        index[tensor] = name
    head = json.dumps({"__metadata__": {"format": "pt"}, **mine}).encode()
    with open(name, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + body)
with open("model.safetensors.index.json", "w") as file:
    json.dump({"metadata": {}, "weight_map": index}, file)
os.remove("model.safetensors")
"""
BREAK = """
cd /srv/models/tiny && cp -a . /srv/models/whole && rm model-00002-of-00003.safetensors tokenizer.json
truncate -s -100 model-00003-of-00003.safetensors && chmod 600 generation_config.json
"""
REPAIR = "rm -r /srv/models/tiny && mv /srv/models/whole /srv/models/tiny"


@pytest.fixture(scope="module")
def host(lab: Lab) -> Host:
    return unused(lab)


@pytest.fixture
def project(tmp_path: Path, host: Host) -> Project:
    return Project(tmp_path, [(host, {})]).write()


def reports(host: Host) -> list[dict[str, object]]:
    return [json.loads(line) for line in host.read("/var/lib/kernelswap/main/history.jsonl").splitlines()]


def test_all_that_is_wrong_with_a_model_and_its_gpus_is_told_before_anything_stops(
    project: Project, host: Host
) -> None:
    host.write("/root/split.py", SPLIT)
    host.run("python3 /root/split.py")
    first = project.deploy("-y")
    assert first.code == 0, "a model in shards is whole"
    pid, served = main_pid(host), release(host)

    host.run(BREAK)
    project.profile("picky", "requires: {architecture: [sm100, sm103], memory: 180000, driver: '999.1'}")
    refused = project.deploy("-y", "--profile", "picky")
    assert refused.code == 1
    for words in (
        "user sglang: /srv/models/tiny/model-00002-of-00003.safetensors: no such file: download it again",
        "user sglang: /srv/models/tiny/model-00003-of-00003.safetensors: is cut off, ",
        "user sglang: /srv/models/tiny: no tokenizer (tokenizer.json, ",
        "user sglang: /srv/models/tiny/generation_config.json: not readable: correct its permissions",
        "is sm120 (NVIDIA RTX PRO 6000 Blackwell Server Edition), `requires:` asks for sm100 or sm103: ",
        "has 97887 MiB, `requires:` asks for 180000 MiB: ",
        "the driver is 580.95.05, `requires:` asks for 999.1: install a newer driver, or choose another profile",
    ):
        assert words in refused
    assert reports(host)[-1]["outcome"] == "refused"
    assert (main_pid(host), release(host)) == (pid, served)

    host.run(REPAIR)
    project.profile("picky", "requires: {architecture: [sm100, sm120], memory: 90000, driver: '580.65'}")
    assert project.deploy("-y", "--profile", "picky").code == 0
    assert release(host).startswith("picky-")


def test_a_single_missing_shard_is_enough(project: Project, host: Host) -> None:
    pid = main_pid(host)
    host.run("mv /srv/models/tiny/model-00001-of-00003.safetensors /srv/away")
    refused = project.deploy("-y", "--profile", "triton")
    host.run("mv /srv/away /srv/models/tiny/model-00001-of-00003.safetensors")
    assert refused.code == 1
    assert "model-00001-of-00003.safetensors: no such file" in refused
    assert main_pid(host) == pid


def test_hardware_that_cannot_be_asked_is_not_what_a_release_requires(project: Project, host: Host) -> None:
    pid = main_pid(host)
    project.profile("picky2", "requires: {architecture: [sm120]}")
    host.run("mkdir -p /run/nvml-sim && echo 'nvmlInit 9' >/run/nvml-sim/fail")
    refused = project.deploy("-y", "--profile", "picky2")
    host.run("rm /run/nvml-sim/fail")
    assert refused.code == 1
    assert "NVML does not answer" in refused
    assert main_pid(host) == pid


# What moe_probe.py finds in the lab's SGLang, for GLM-4.7 on 8 GPUs.
ASK = """
import json, sys
space = {"__name__": "moe_probe"}
exec(sys.stdin.read(), space)
values = {"model_path": "/root/glm", "tp_size": 8, "ep_size": 1, "moe_runner_backend": "auto"}
print(json.dumps(space["tuning_files"](values, "NVIDIA H200")))
"""
GLM = """{
  "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 160, "n_shared_experts": 1, "moe_intermediate_size": 1536
}"""


def test_sglangs_own_function_names_the_tuning_file(host: Host) -> None:
    host.write("/root/glm/config.json", GLM)
    host.write("/root/moe_probe.py", MOE_PROBE)
    host.write("/root/ask.py", ASK)
    python = "PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 /opt/sglang/bin/python -W ignore /root/ask.py"
    sought = decode(Sought, host.output(f"{python} </root/moe_probe.py | tail -1"))
    assert sought.names[0] == "E=161,N=192,device_name=NVIDIA_H200.json"
    assert host.output(f"find {sought.folder}/triton_* -name '{sought.names[0]}'"), "SGLang 0.5.23 brings this one"
