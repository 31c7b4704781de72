from __future__ import annotations

import hashlib
import json
import os
import runpy
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kernelswap import bundle
from kernelswap.agent import glance


def test_the_same_installation_gives_the_same_bytes() -> None:
    assert bundle.build.__wrapped__().content == bundle.build.__wrapped__().content


def test_it_holds_what_the_agent_needs_and_no_controller_code(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    names = set(zipfile.ZipFile(path).namelist())
    assert {"__main__.py", "pynvml.py", "kernelswap/protocol.py", "kernelswap/agent/__main__.py"} <= names
    assert any(name.startswith("kernelswap/knowledge/") for name in names)
    assert not {name for name in names if name.startswith(("kernelswap/cli", "kernelswap/facts"))}


def test_it_is_built_in_a_moment() -> None:
    start = time.perf_counter()
    bundle.build.__wrapped__()
    assert time.perf_counter() - start < 0.3


@pytest.mark.parametrize("words", [["help"], ["inspect"]])
def test_it_runs_without_the_package_installed(tmp_path: Path, words: list[str]) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    code = (
        f"import sys; sys.argv[1:] = {json.dumps(words)}; import runpy; runpy.run_path({str(path)!r}, run_name='check')"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_python_that_is_too_old_is_told(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    code = f"import sys; sys.version_info = (3, 8, 10); import runpy; runpy.run_path({str(path)!r}, run_name='check')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is too old: install Python 3.9 or newer" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_module_is_loaded_before_a_swap_starts(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    code = f"""if True:
        import json, runpy, sys, zipfile
        sys.argv[1:] = ["swap"]
        runpy.run_path({str(path)!r}, run_name="check")
        names = [n[:-3].replace("/", ".") for n in zipfile.ZipFile({str(path)!r}).namelist() if n.endswith(".py")]
        wanted = {{n.removesuffix(".__init__") for n in names if n != "__main__"}}
        print(json.dumps(sorted(wanted - set(sys.modules))))
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("new", [b"garbage", b""])
def test_a_running_agent_does_not_mind_that_its_file_is_replaced(new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    code = f"""if True:
        import json, os, runpy, sys
        sys.argv[1:] = ["run"]
        runpy.run_path({str(path)!r}, run_name="check")
        open({str(path)!r} + ".new", "wb").write({new!r})
        os.replace({str(path)!r} + ".new", {str(path)!r})
        from kernelswap.agent import gpus, knowledge, signatures
        print(len(signatures.load().signatures), gpus.read.__name__)
        names = [name for name in {sorted(p.name for p in (bundle.PACKAGE / "knowledge").glob("*.json"))!r}]
        print([bool(json.loads(knowledge.read(name))) for name in names])
        from kernelswap.agent import __main__
        print(__main__.main([]))
        try:
            gpus.read()
        except gpus.GpuError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ImportError" not in done.stdout + done.stderr


def test_its_repr_is_short() -> None:
    assert len(repr(bundle.build())) < 60


def test_bytecode_beside_the_agent_is_taken_if_it_is_of_this_agent_and_sound(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    for old in ("agent-0123456789abcdef.cpython-30.zip", "glance-0123456789abcdef.pyc"):
        (tmp_path / old).touch()
    assert loaded_from(path) == path
    done = subprocess.run([sys.executable, "-IS", path, "compile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    digest, short, bytecode = sorted(set(tmp_path.iterdir()) - {path}, key=lambda each: each.suffix)  # the old are gone
    assert digest.name == path.name + glance.DIGEST
    assert "running" in runpy.run_path(str(short))
    short.write_bytes(short.read_bytes()[:-100])  # as after a power cut: it fails, and the glance goes by its source
    done = subprocess.run([sys.executable, "-IS", short, "main", "", "{}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert loaded_from(path) == bytecode
    whole = bytecode.read_bytes()
    bytecode.write_bytes(whole[: len(whole) // 2])  # as after a power cut
    assert loaded_from(path) == path
    bytecode.write_bytes(whole)
    path.write_bytes(bundle.build().content.replace(bytecode.name[6:22].encode(), b"fedcba9876543210"))
    assert loaded_from(path) == path


def test_the_kept_digest_counts_for_the_very_same_file_only(tmp_path: Path) -> None:
    path, digest = tmp_path / "agent.pyz", bundle.build().digest
    path.write_bytes(bundle.build().content)
    assert glance.agent(str(path)) == digest  # none is kept yet
    assert subprocess.run([sys.executable, "-IS", path, "compile"], check=False).returncode == 0
    kept = path.with_name(path.name + glance.DIGEST)
    kept.write_text(kept.read_text().replace(digest, "kept"))
    assert glance.agent(str(path)) == "kept"
    times = path.stat()
    path.write_bytes(path.read_bytes().replace(b"def main(", b"def mine("))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    assert glance.agent(str(path)) == hashlib.blake2b(path.read_bytes()).hexdigest() != digest
    for torn in (b"", b"\xff", kept.read_bytes()[:140]):
        kept.write_bytes(torn)
        assert glance.agent(str(path)) == hashlib.blake2b(path.read_bytes()).hexdigest()
    path.unlink()
    assert glance.agent(str(path)) == ""


def test_an_agent_that_cannot_keep_its_bytecode_says_so_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    (tmp_path / bytecode_name(path)).mkdir()
    done = subprocess.run([sys.executable, "-IS", path, "compile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, "no deploy fails for it"
    assert "goes without its bytecode" in done.stderr
    assert loaded_from(path) == path


@pytest.mark.parametrize(
    ("module", "spared"),
    [
        ("inspection", {"gpus", "occupants", "client", "service", "transaction"}),
        ("guard", {"client", "service", "transaction"}),
    ],
)
def test_what_is_asked_often_loads_little(tmp_path: Path, module: str, spared: set[str]) -> None:
    path = tmp_path / "agent.pyz"
    path.write_bytes(bundle.build().content)
    importing = f"__import__('kernelswap.agent.{module}') and sorted(sys.modules)"
    loaded = set(after_start(path, [], importing))
    assert {f"kernelswap.agent.{name}" for name in spared} & loaded == set()
    assert "pynvml" not in loaded


def loaded_from(path: Path) -> Path:
    package = after_start(path, ["help"], "sys.modules['kernelswap.protocol'].__file__")
    return Path(package.partition("/kernelswap/")[0])


def bytecode_name(path: Path) -> str:
    name = after_start(path, ["help"], "sys.path[0]")
    return Path(name).name


def after_start(path: Path, words: list[str], expression: str) -> Any:
    """What an expression tells once the agent has done what it was asked."""
    code = f"""if True:
        import json, runpy, sys
        sys.argv[1:] = {words!r}
        try:
            runpy.run_path({str(path)!r}, run_name="__main__")
        except SystemExit:
            pass
        print(json.dumps({expression}))
    """
    done = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
