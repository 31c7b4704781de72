"""bash itself, with stand-ins for the programs, gives the words that the imported files render to."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest
from launch_lines import CASES, ROOT, imported, rendered

SNAPSHOT = ROOT / "kernelswap/knowledge/sglang/flags-0.5.23.json"
TODAY = {
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}
# Each starts its server by a name on PATH and does nothing else that matters.
SCRIPTS = [
    "l1.txt", "l2.txt", "l6.txt", "l9.txt", "l16.txt", "l17.txt", "plain.sh", "arrays.sh", "json-escaped.sh",
    "one-node.sh", "secrets.sh", "loops.sh", "conditions.sh", "empty-array.sh",
]  # fmt: skip
STAND_IN = """#!/bin/bash
[ "$1" = "-m" ] || [ "$1" = serve ] || [ "$1" = run ] || [ "${0##*/}" = nohup ] || exit 0
printf '%s\\0' "$@" > "$OUT"
"""


def parsed(words: list[str]) -> dict[str, object]:
    """By argparse, with SGLang's own flags. JSON is compared as JSON."""
    parser = argparse.ArgumentParser(add_help=False)
    for name, row in json.loads(SNAPSHOT.read_text())["flags"].items():
        spellings = [f"--{each}" for each in (name, *row.get("aliases", ()))]
        if row.get("bare"):
            parser.add_argument(*spellings, action="store_true")
        else:
            parser.add_argument(*spellings, nargs=row.get("nargs"))
    found = vars(parser.parse_args([TODAY.get(word, word) for word in words]))
    return {key: value for key, value in found.items() if value}


def by_bash(name: str, folder: Path) -> list[str]:
    for program in ("python", "python3", "sglang", "docker", "nohup", "basename"):
        (folder / program).write_text(STAND_IN)
        (folder / program).chmod(0o755)
    environment = {"PATH": str(folder), "OUT": str(folder / "out"), "MODEL_DIR": "/srv/models/x"}
    script = f"{(CASES / name).read_text()}\nwait\n"
    subprocess.run(
        ["/bin/bash", "-c", script], env=environment, cwd=folder, check=True, timeout=30, stdout=subprocess.DEVNULL
    )
    words = (folder / "out").read_text().split("\0")[:-1]
    start = words.index("sglang.launch_server") if "sglang.launch_server" in words else words.index("serve")
    return words[start + 1 :]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_that_bash_gives(name: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    real = parsed(by_bash(name, tmp_path / "bin"))
    wanted = {"path": "/srv/models/x"} if name == "l9.txt" else {}
    ours = parsed(rendered(imported(name, **wanted), tmp_path / "library"))
    model = str(real["model_path"])
    if not model.startswith("/"):  # a name to download becomes a folder
        real["model_path"] = f"/srv/models/{model.partition('/')[2]}"
    for left_out in ("api_key", "admin_api_key", "nnodes", "node_rank", "dist_init_addr"):
        real.pop(left_out, None)
    assert ours == {"served_model_name": model, "host": "127.0.0.1", "port": "30000", **real}
