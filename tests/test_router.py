"""A host's router: what its data may say, and the unit that comes of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_docs import REFERENCE

from kernelswap.errors import ConfigError
from kernelswap.protocol import ROUTER_KEY
from kernelswap.router import DEFAULTS, KEYED, RouterHostFile, RouterSpec, router_spec, unit
from kernelswap.spec import Secret

HERE = Path(__file__).parent
TEMPLATES = HERE.parent / "templates"
CASES = json.loads((HERE / "router_faults.json").read_text())


def spec(**router: Any) -> RouterSpec:
    found = router_spec({"router": router}, "host r1")
    assert found
    return found


def start(text: str) -> str:
    return text.partition("ExecStart=")[2].partition("\n\n")[0].replace(" \\\n   ", "")


def test_every_default_is_decided() -> None:
    assert router_spec({"model": "m"}, "host r1") is None
    plain = spec()
    assert (plain.url, plain.user, plain.key) == ("http://127.0.0.1:30000", "sglang-router", None)
    words = start(unit(plain, TEMPLATES))
    assert words.startswith("/opt/sglang-router/bin/python -m sglang_router.launch_router --host 0.0.0.0 --port 30000")
    for name, value in DEFAULTS.items():
        assert f" --{name} {value}" in words
    assert "worker-urls" not in words


def test_what_is_declared_wins() -> None:
    text = unit(spec(port=8000, host="::", flags={"policy": "round_robin", "cb-failure-threshold": None}), TEMPLATES)
    assert " --port 8000 " in text
    assert " --policy round_robin" in text
    assert "cb-failure-threshold" not in text
    assert "TimeoutStopSec=200\n" in text
    assert spec(host="::", port=8000).url == "http://[::1]:8000"
    assert "TimeoutStopSec=30\n" in unit(spec(flags={"shutdown-grace-period-secs": 10}), TEMPLATES)
    assert "TimeoutStopSec=200\n" in unit(spec(flags={"shutdown-grace-period-secs": None}), TEMPLATES), "its default"


def test_a_key_is_in_no_word_of_the_unit(tmp_path: Path) -> None:
    keyed = spec(key={"env": "RK"})
    assert keyed.key == Secret("RK")
    text = unit(keyed, TEMPLATES)
    assert f"LoadCredential=key:{ROUTER_KEY}" in text
    assert "${CREDENTIALS_DIRECTORY}/key --host 0.0.0.0" in text.replace(" \\\n   ", "")
    # What is started there gives the router the key all the same.
    package = tmp_path / "sglang_router"
    package.mkdir()
    (package / "launch_router.py").write_text("import sys\ndef main(): print(sys.argv[1:])\n")
    (tmp_path / "key").write_text("s3cret\n")
    words = [sys.executable, "-c", KEYED, str(tmp_path / "key"), "--port", "8000"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['--port', '8000', '--api-key', 's3cret']\n"


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case["router"])[:40])
def test_all_faults_with_their_place(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        router_spec({"router": case["router"]}, "host r1")
    assert str(error.value).splitlines() == case["faults"]


@pytest.mark.parametrize("key", [field.alias or name for name, field in RouterHostFile.model_fields.items()])
def test_every_key_is_documented(key: str) -> None:
    assert f"`{key}`" in REFERENCE.partition("## Routers")[2].partition("\n## ")[0]
