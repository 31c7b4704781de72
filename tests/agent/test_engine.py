"""The programs that are given to the engine's interpreter."""

from __future__ import annotations

import getpass
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import engine, processes
from kernelswap.agent.engine import Answer
from kernelswap.agent.host import Folders
from kernelswap.protocol import Accuracy, Gpu, Plan, Throughput, Timeouts, Verify, decode

ENGINES = Path(__file__).parent / "engines"
SAYS = json.loads((ENGINES / "says.json").read_text())
H200 = Gpu(0, name="NVIDIA H200", capability="9.0", memory_total=143771)


@dataclass(frozen=True)
class Installed:
    """An engine in a folder, and an instance that asks it."""

    root: Path

    @property
    def folders(self) -> Folders:
        return Folders("main", self.root / "host")

    @property
    def server_args(self) -> Path:
        return self.root / "sglang/srt/server_args.py"

    @property
    def kept(self) -> list[Path]:
        return sorted(self.folders.answers.glob("*.json"))

    def plan(self, *words: str, timeout: float = 60) -> Plan:
        argv = ("-m", "sglang.launch_server", *(words or ("--tp-size", "8", "--page-size", "1")))
        environment = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        plan = Plan("main", "b-2", "b", "m", sys.executable, argv, environment, getpass.getuser(), "/m", "m", "::", 1)
        return replace(plan, timeouts=Timeouts(preflight=timeout))

    def says(self, *words: str, gpus: Sequence[Gpu] = (H200,), timeout: float = 60) -> Answer:
        with engine.asked(self.folders, self.plan(*words, timeout=timeout), gpus) as answer:
            return answer()

    def asked_anew(self, words: Sequence[str] = (), **changed: Any) -> bool:
        """Whether SGLang itself is asked, not the answers that were kept."""
        mark = self.root / "imported"
        mark.unlink(missing_ok=True)
        self.says(*words, **changed)
        return mark.exists()


def install(root: Path, text: str) -> Installed:
    installed = Installed(root)
    installed.server_args.parent.mkdir(parents=True)
    (root / "torch.py").write_text((ENGINES / "torch.py").read_text())
    first = f'import warnings\nwarnings.warn("of the import")\nopen({str(root / "imported")!r}, "w").close()\n'
    (root / "sglang/__init__.py").write_text(f'__version__ = "0.5.99"\n{first}')
    (root / "sglang/srt/__init__.py").touch()
    installed.server_args.write_text(text)
    root.chmod(0o755)
    return installed


@pytest.mark.parametrize("name", SAYS)
def test_what_sglang_says(name: str, tmp_path: Path) -> None:
    text = (ENGINES / f"{name}.py").read_text()
    assert replace(install(tmp_path, text).says(), engine="") == decode(Answer, json.dumps(SAYS[name]))


def test_the_same_engine_is_the_same_whatever_it_is_asked(tmp_path: Path) -> None:
    """And whether it answers: what its benchmark has measured can be compared."""
    installed = install(tmp_path, (ENGINES / "only_parses.py").read_text())
    (tmp_path / "model").mkdir()
    first = installed.says().engine
    assert len(first) == 64
    assert installed.says("--page-size", str(tmp_path / "model")).engine == first
    assert installed.says().engine == first, "a kept answer too"
    installed.server_args.write_text("raise ValueError\n")
    assert installed.says().engine not in ("", first)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "ModuleNotFoundError: No module named 'sglang.bench_serving'"),
        ({"bench_serving.py": ""}, ""),
        ({"bench_serving.py": "import no_such"}, "ModuleNotFoundError: No module named 'no_such'"),
        ({"bench_serving.py": "from sglang import no_such"}, "ImportError: cannot import name 'no_such'"),
        ({"bench_serving.py": "1 / 0"}, ""),
        ({"benchmark/__init__.py": "", "bench_serving.py": ""}, ""),
        ({"benchmark/__init__.py": "", "benchmark/serving.py": "import no_such", "bench_serving.py": ""}, "'no_such'"),
    ],
)
def test_what_judges_and_cannot_be_imported_is_told(files: dict[str, str], says: str, tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "only_parses.py").read_text())
    for name, text in files.items():
        (tmp_path / "sglang" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "sglang" / name).write_text(text)
    assert installed.says().missing == {}, "where nothing needs it"
    verify = Verify(throughput=Throughput(1, 1, 1, 1), accuracy=Accuracy("/srv/questions.jsonl"))
    with engine.asked(installed.folders, replace(installed.plan(), verify=verify), (H200,)) as answer:
        found = answer()
    assert found.values, "the flags are asked about all the same"
    assert found.missing.pop("accuracy") == "ModuleNotFoundError: No module named 'sglang.test'"
    assert found.missing.keys() == ({"throughput"} if says else set())
    assert says in found.missing.get("throughput", "")


def test_an_answer_is_kept_until_something_changes(tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "resolves.py").read_text())
    first = installed.says()
    assert installed.asked_anew() is False
    assert installed.says() == first
    assert installed.asked_anew(gpus=(replace(H200, capability="10.0"),))
    assert installed.asked_anew(gpus=())
    installed.server_args.write_text(installed.server_args.read_text() + "\n")
    assert installed.asked_anew()
    (tmp_path / "transformers-6.0.dist-info").mkdir()
    (tmp_path / "transformers-6.0.dist-info/RECORD").touch()
    assert installed.asked_anew()
    assert not installed.asked_anew()


def test_an_answer_is_kept_until_the_model_changes(tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "only_parses.py").read_text())
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    config.write_text("{}")
    for words in (("--page-size", str(model)), (f"--page-size={model}",)):
        assert installed.asked_anew(words=words)
        assert not installed.asked_anew(words=words)
        before = config.stat()
        config.write_text("[]")
        os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert installed.asked_anew(words=words)
        (model / f"{len(words)}.safetensors").touch()
        assert installed.asked_anew(words=words)
        config.write_text("{}")


def test_a_file_system_that_hangs_holds_nobody_beyond_the_deadline(tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "only_parses.py").read_text())
    model = tmp_path / "model"
    model.mkdir()
    os.mkfifo(model / "config.json")  # opening it waits for a writer, as a dead mount waits for its server
    answer = installed.says("--page-size", str(model), timeout=1.5)
    assert answer == Answer(phase="start", refusal="it did not answer within the 1.5 s of `timeouts: preflight`")


def test_what_goes_wrong_beside_a_kept_answer_is_told_as_it_is(tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "resolves.py").read_text())
    installed.says()
    with pytest.raises(OSError, match="of another"), engine.asked(installed.folders, installed.plan(), (H200,)):
        raise OSError("of another")


def test_a_torn_answer_is_asked_for_again(tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / "resolves.py").read_text())
    installed.says()
    (kept,) = installed.kept
    kept.write_text(kept.read_text()[:40])
    assert installed.asked_anew()
    assert not installed.asked_anew()


@pytest.mark.parametrize("name", ["wants_a_context", "full_disk", "crashes", "cannot_be_imported", "no_model"])
def test_what_another_try_may_answer_otherwise_is_not_kept(name: str, tmp_path: Path) -> None:
    installed = install(tmp_path, (ENGINES / f"{name}.py").read_text())
    installed.says()
    assert installed.kept == []


def test_the_newest_answers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "KEPT", 2)
    for number in range(4):
        engine._keep(tmp_path / f"{number}.json", Answer())
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert {path.stem for path in tmp_path.glob("*.json")} == {"2", "3"}


def test_a_sglang_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    text = "import subprocess\nsubprocess.run(['sleep', '4711'])\n"
    answer = install(tmp_path, text).says(timeout=1.5)
    assert answer == Answer(phase="start", refusal="it did not answer within the 1.5 s of `timeouts: preflight`")
    until = time.monotonic() + 10  # what was killed may still be on its way out
    while left := [each for each in processes.table().values() if each.argv == ("sleep", "4711")]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    installed = install(tmp_path, "")
    plan = replace(installed.plan(), python="/no/python")
    with engine.asked(installed.folders, plan) as answer:
        assert answer() == Answer(phase="start", refusal="/no/python: No such file or directory")
