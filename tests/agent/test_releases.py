from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from samples import plan

from kernelswap.agent import files, releases
from kernelswap.agent.host import Folders
from kernelswap.agent.served import served
from kernelswap.protocol import Releases, Resolved, encode

INFO = {
    "tp_size": 1,
    "api_key": "never-seen",
    "hf_token": "x",
    "chat_template": "say never-seen",
    "launch_command": "sglang --api-key never-seen",
    "internal_states": [{"a": 1}],
    "skip_tokenizer_init": False,
    "max_total_num_tokens": 9,
    "version": "0.5.23",
}


def test_what_a_server_says_without_states_and_secrets() -> None:
    told = served(INFO, "b-2", ["never-seen"], None)
    assert told.values == {"tp_size": "1", "chat_template": '"say [redacted]"', "skip_tokenizer_init": "false"}
    assert (told.release, told.version, told.served) == ("b-2", "0.5.23", True)


def test_only_arguments_that_the_preflight_knew_where_there_was_one() -> None:
    known = Resolved("b-2", "0.5.23", {"tp_size": "2", "gone": "1", "api_key": "null"})
    assert served(INFO, "b-2", [], known).values == {"tp_size": json.dumps(1)}


AMBIENT = ("_", "PWD", "LC_ALL", "SSH_CONNECTION", "INVOCATION_ID", "CREDENTIALS_DIRECTORY", "SUDO_USER", "MOTD_SHOWN")
OWN = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "HF_HUB_CACHE", "USE_TORCH", "_X")


@pytest.mark.parametrize("name", AMBIENT + OWN)
def test_what_sessions_add_is_no_part_of_a_server(name: str) -> None:
    assert releases._environment({name: "x"}, None, "") == ({} if name in AMBIENT else {name: "x"})


def test_the_values_of_secret_variables_are_hidden() -> None:
    values = {"HF_TOKEN": "hf_abcdefghijk", "URL": "https://u:pw12@h/a=b", "A": "x=y"}
    hidden = releases._environment(values, None, "")
    assert hidden == {"HF_TOKEN": "[redacted]", "URL": "https://u:[redacted]@h/a=b", "A": "x=y"}


def test_the_indices_that_the_guard_told_are_the_gpus_of_the_release(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    staged = replace(plan(), release="b-2", environment={"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"})
    files.write(folders.release("b-2") / "plan.json", encode(staged))
    files.write(folders.gpu_indices, "CUDA_VISIBLE_DEVICES=0,1\n")
    told = [releases._environment({"CUDA_VISIBLE_DEVICES": value}, folders, "b-2") for value in ("0,1", "1")]
    assert [values["CUDA_VISIBLE_DEVICES"] for values in told] == ["GPU-a,GPU-b", "1"]


def test_what_is_staged_and_what_is_known_of_it(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    assert releases._staged(folders) == Releases("main")
    for name in ("a-1", "b-2", "torn"):
        files.write(folders.release(name) / "plan.json", encode(replace(plan(), release=name)))
    files.write(folders.release("torn") / "plan.json", "{")
    resolved = Resolved("b-2", "0.5.23", {"tp_size": "1"})
    files.write(folders.resolved("b-2"), encode(resolved))
    files.write(folders.resolved("a-1"), "{")
    folders.known_good.symlink_to("releases/b-2")
    told = releases._staged(folders)
    assert [plan.release for plan in told.plans] == ["a-1", "b-2"]
    assert (told.known_good, told.previous, told.resolved) == ("b-2", None, (resolved,))
