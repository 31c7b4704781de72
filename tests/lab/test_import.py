"""`kernelswap import`: the real systemd and the real SGLang's parser read a launch line and its files alike."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from labhost import ROOT, Host

sys.path.insert(0, str(ROOT / "tests" / "importing"))
from launch_lines import CASES, imported, rendered
from test_bash import SCRIPTS, TODAY, by_bash

UNITS = ["l12.service", "unit-full.service", "unit-json-quoted.service"]
# What needs another program, user or answer than a recorder has.
ELSEWHERE = re.compile(r"(User|Type|ExecStartPre|EnvironmentFile|Restart|WorkingDirectory|KillMode)=")
PARSER = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([vars(parser.parse_args(words)) for words in json.load(sys.stdin)], default=str))
"""


@pytest.fixture
def folder(host: Host) -> Iterator[str]:
    name = f"import-{uuid.uuid4().hex[:8]}"
    host.run(f"mkdir -p /run/{name}")
    yield f"/run/{name}"
    host.run(f"systemctl stop '{name}*'; rm -rf /run/{name} /run/systemd/system/{name}*; systemctl daemon-reload")


def by_systemd(host: Host, folder: str, name: str) -> list[str]:
    """The words after the module that the unit's process gets."""
    host.write(f"{folder}/python", f'#!/bin/sh\nprintf "%s\\0" "$@" >{folder}/out\n', mode=0o755)
    lines = [line for line in (CASES / name).read_text().splitlines() if not ELSEWHERE.match(line)]
    text = re.sub(r"^ExecStart=-?\S+", f"ExecStart={folder}/python", "\n".join(lines), flags=re.MULTILINE)
    unit = f"{folder.rpartition('/')[2]}-{UNITS.index(name)}.service"
    host.write(f"/run/systemd/system/{unit}", text.replace("[Service]", "[Service]\nType=oneshot", 1) + "\n")
    host.run(f"systemctl daemon-reload && systemctl start {unit}")
    return host.read(f"{folder}/out").split("\0")[2:-1]


def test_sglang_parses_a_launch_line_and_its_files_alike(host: Host, folder: str, tmp_path: Path) -> None:
    pairs = []
    for name in [*SCRIPTS, *UNITS]:
        home = tmp_path / name
        (home / "bin").mkdir(parents=True)
        real = by_systemd(host, folder, name) if name in UNITS else by_bash(name, home / "bin")
        wishes = {"path": "/srv/models/x"} if name == "l9.txt" else {}
        pairs.append(
            (name, [TODAY.get(word, word) for word in real], rendered(imported(name, **wishes), home / "library"))
        )
    # The one value that only a fork has.
    known = [[["auto", word][word != "b12x"] for word in words] for _, *both in pairs for words in both]
    host.write(f"{folder}/parse.py", PARSER)
    host.write(f"{folder}/words.json", json.dumps(known))
    engine = "PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 /opt/sglang/bin/python -W ignore"
    parsed = json.loads(host.run(f"cd / && {engine} {folder}/parse.py <{folder}/words.json").stdout.splitlines()[-1])
    for (name, *_), theirs, ours in zip(pairs, parsed[::2], parsed[1::2], strict=True):
        model = theirs["model_path"]
        theirs["served_model_name"] = theirs["served_model_name"] or model
        if not model.startswith("/"):  # a name to download becomes a folder
            theirs["model_path"] = f"/srv/models/{model.partition('/')[2]}"
        for elsewhere in ("api_key", "admin_api_key", "nnodes", "node_rank", "dist_init_addr"):
            ours.pop(elsewhere), theirs.pop(elsewhere)
        assert ours == theirs, name
