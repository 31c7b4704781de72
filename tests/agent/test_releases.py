from __future__ import annotations

import json

import pytest

from kernelswap.agent import releases
from kernelswap.protocol import Resolved

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
    told = releases.served(INFO, "b-2", ["never-seen"], None)
    assert told.values == {"tp_size": "1", "chat_template": '"say [redacted]"', "skip_tokenizer_init": "false"}
    assert (told.release, told.version, told.served) == ("b-2", "0.5.23", True)


def test_only_arguments_that_the_preflight_knew_where_there_was_one() -> None:
    known = Resolved("b-2", "0.5.23", {"tp_size": "2", "gone": "1", "api_key": "null"})
    assert releases.served(INFO, "b-2", [], known).values == {"tp_size": json.dumps(1)}


AMBIENT = ("_", "PWD", "LC_ALL", "SSH_CONNECTION", "INVOCATION_ID", "CREDENTIALS_DIRECTORY", "SUDO_USER", "MOTD_SHOWN")
OWN = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "HF_HUB_CACHE", "USE_TORCH", "_X")


@pytest.mark.parametrize("name", AMBIENT + OWN)
def test_what_sessions_add_is_no_part_of_a_server(name: str) -> None:
    assert releases._environment({name: "x"}, None, "") == ({} if name in AMBIENT else {name: "x"})


def test_the_values_of_secret_variables_are_hidden() -> None:
    values = {"HF_TOKEN": "hf_abcdefghijk", "URL": "https://u:pw12@h/a=b", "A": "x=y"}
    hidden = releases._environment(values, None, "")
    assert hidden == {"HF_TOKEN": "[redacted]", "URL": "https://u:[redacted]@h/a=b", "A": "x=y"}
