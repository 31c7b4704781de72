"""The model's files, in real folders and looked at by a real process as another user."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pwd
import re
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import samples

from kernelswap.agent import model_files
from kernelswap.protocol import Accuracy, Plan, Verify

CASES = json.loads((Path(__file__).parent / "model_folders.json").read_text())
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = {"weight_map": {f"layers.{number}.weight": shard for number, shard in enumerate(SHARDS)}}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the unit's user")


def safetensors(names: list[str], size: int = 64) -> bytes:
    places = {name: [at * size, (at + 1) * size] for at, name in enumerate(names)}
    tensors = {name: {"dtype": "U8", "shape": [size], "data_offsets": place} for name, place in places.items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size * len(names))


def pickle() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


def make(folder: Path) -> None:
    for number, shard in enumerate(SHARDS):
        (folder / shard).write_bytes(safetensors([f"layers.{number}.weight"]))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3}')
    folder.chmod(0o755)


def change(path: Path, what: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if what is None:
        path.unlink()
    elif isinstance(what, str):
        path.write_text(what)
    elif "link" in what:
        path.unlink(missing_ok=True)
        path.symlink_to(what["link"])
    elif "mode" in what:
        if not path.exists() and not path.suffix:
            path.mkdir()
        elif not path.exists():
            path.touch()
        path.chmod(what["mode"])
    else:
        data = path.read_bytes() if path.exists() else b""
        data = safetensors(what["tensors"]) if "tensors" in what else pickle() if "zip" in what else data
        data = data[: what.get("keep", len(data)) - what.get("cut", 0) or None] if what.get("keep") != 0 else b""
        path.write_bytes(data + bytes(what.get("add", 0)))


def a_plan(folder: Path, user: str = "", flags: dict[str, str] | None = None) -> Plan:
    flags = {name: value.replace("{}/", f"{folder}/") for name, value in (flags or {}).items()}
    user = user or pwd.getpwuid(os.geteuid()).pw_name
    base = samples.plan()
    return dataclasses.replace(base, python="/usr/bin/python3", user=user, model_path=str(folder), flags=flags)


@needs_root
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_each_fault_is_named_and_no_other(tmp_path: Path, case: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and above.stat().st_mode & 0o055 != 0o055:
            above.chmod(0o755)  # pytest's own folders let nobody else in
    make(folder)
    for name, what in case.get("change", {}).items():
        change(folder / name, what)
    plan = a_plan(folder, case.get("as", ""), case.get("flags"))
    found = model_files.look(plan)
    faults, notes = [str(fault) for fault in model_files.faults(plan, found)], model_files.notes(plan, found)
    expected = case.get("faults", [])
    assert len(faults) == len(expected), faults
    for line in faults:
        assert line.startswith(f"user {plan.user}: {folder}")
        assert any(re.search(pattern, line) for pattern in expected), line
    for pattern in expected:
        assert any(re.search(pattern, line) for line in faults), pattern
    assert [bool(re.search(case["notes"][0], line)) for line in notes] == [True] * len(case.get("notes", []))


@needs_root
def test_hundreds_of_shards_are_looked_at_in_a_moment(tmp_path: Path) -> None:
    make(tmp_path)
    weights = {}
    for shard in range(200):
        name = f"model-{shard + 1:05}-of-00200.safetensors"
        tensors = [f"layers.{shard}.experts.{expert}.weight" for expert in range(500)]
        (tmp_path / name).write_bytes(safetensors(tensors, 8))
        weights.update(dict.fromkeys(tensors, name))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    begin = time.monotonic()
    assert model_files.look(a_plan(tmp_path)).faults == ()
    assert time.monotonic() - begin < 10, "two seconds on two busy cores: 100,000 tensors"


@needs_root
def test_the_list_of_faults_ends_after_ten(tmp_path: Path) -> None:
    make(tmp_path)
    shards = {f"w{number}": f"model-{number:05}-of-00040.safetensors" for number in range(1, 41)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    plan = a_plan(tmp_path)
    faults = model_files.faults(plan, model_files.look(plan))
    assert len(faults) == 11
    assert str(faults[-1]) == "30 more faults of the model's files: correct those above first"


@needs_root
@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd", "/usr/bin/false"])
def test_an_interpreter_that_cannot_be_executed_is_a_fault(tmp_path: Path, python: str) -> None:
    plan = dataclasses.replace(a_plan(tmp_path), python=python)
    (fault,) = model_files.faults(plan, model_files.look(plan))
    assert f"cannot execute {python}" in fault.what


@needs_root
def test_a_file_system_that_hangs_is_a_fault(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # who opens it waits for the other end
    plan = a_plan(tmp_path)
    (fault,) = model_files.faults(plan, model_files.look(plan, timeout=1))
    assert "could not be looked at within 1 s" in fault.what


TABLE = """\
21 1 0:20 / / rw,relatime - overlay overlay rw
30 21 0:30 / /data rw - nfs4 server:/export rw
31 21 0:31 / /data/with\\040space rw - fuse.gcsfuse bucket rw
32 21 0:32 / /database rw - xfs /dev/sda rw
33 21 0:33 / /scratch rw - ext4 /dev/sdb rw
34 33 0:34 / /scratch rw - lustre mds:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "slow"),
    [
        ("/srv/m", "overlay", False),
        ("/data", "nfs4", True),
        ("/data/m", "nfs4", True),
        ("/data/with space/m", "fuse.gcsfuse", True),
        ("/database/m", "xfs", False),
        ("/scratch/m", "lustre", True),
    ],
)
def test_the_file_system_is_told_where_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: str, slow: bool
) -> None:
    (tmp_path / "mountinfo").write_text(TABLE)
    answer = model_files.file_system(path, tmp_path / "mountinfo")
    assert answer[0] == kind
    monkeypatch.setattr(model_files, "file_system", lambda _path: answer)
    lines = model_files.notes(a_plan(Path(path)), model_files.ModelFiles(real=path))
    assert [kind in line and "--weight-loader-prefetch-checkpoints" in line for line in lines] == [True] * slow
    ahead = a_plan(Path(path), flags={"weight-loader-prefetch-checkpoints": "true"})
    assert all("--weight" not in line for line in model_files.notes(ahead, model_files.ModelFiles(real=path)))


def test_the_probe_needs_no_package_of_ours() -> None:
    assert "kernelswap" not in re.sub(r'"""[\s\S]*?"""', "", model_files.PROBE)


LINE = '{"question": "1+1?", "answer": "#### 2"}\n'


@needs_root
@pytest.mark.parametrize(
    ("text", "mode", "fault"),
    [
        (LINE * 3 + "\n", 0o644, ""),
        (LINE * 3, 0o600, "not readable"),  # root can, and the evaluator is not root
        (LINE * 2, 0o644, "has 2 questions, verify.accuracy asks 3"),
        (LINE * 2 + '{"question": "1+1?"}', 0o644, "without question and answer"),
        (LINE * 2 + "[1]", 0o644, "without question and answer"),
        (LINE + "{", 0o644, "is no JSON lines"),
        ("\udcff", 0o644, "is no JSON lines"),
        (None, 0o644, "no such file"),
    ],
)
def test_graded_questions_are_read_by_who_will_read_them(
    text: str | None, mode: int, fault: str, tmp_path: Path
) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above.stat().st_mode & 0o055 != 0o055:
            above.chmod(0o755)
    make(tmp_path)
    path = tmp_path / "questions.jsonl"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
        path.chmod(mode)
    wanted = Verify(accuracy=Accuracy(str(path), questions=3))
    plan = dataclasses.replace(a_plan(tmp_path, "nobody"), verify=wanted)
    found = [str(each) for each in model_files.faults(plan, model_files.look(plan))]
    assert len(found) == bool(fault)
    assert fault in "".join(found)
    assert "".join(found).startswith(f"user nobody: {path}: " if fault else "")


def test_a_look_that_was_killed_says_so(tmp_path: Path) -> None:
    """As where memory is short: the interpreter can well be executed."""
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o755)
    plan = dataclasses.replace(a_plan(tmp_path), python=str(killed))
    (fault,) = model_files.faults(plan, model_files.look(plan))
    assert "was killed by signal 9: see whether memory is short" in str(fault)
    assert "cannot execute" not in fault.what
