"""Models and profiles as files: tests/profiles/bad/<case>/ holds them with the whole text of their faults."""

from pathlib import Path

import pytest

from kernelswap.errors import ConfigError
from kernelswap.library import load_library

ROOT = Path(__file__).parent.parent
BAD = Path(__file__).parent / "profiles" / "bad"


@pytest.mark.parametrize("case", sorted(path.name for path in BAD.iterdir()))
def test_every_fault_is_reported_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD / case)
    with pytest.raises(ConfigError) as error:
        load_library(Path())
    assert str(error.value) == (BAD / case / "faults.txt").read_text().rstrip("\n")


@pytest.mark.parametrize("case", sorted(path.name for path in BAD.iterdir()))
def test_no_fault_shows_a_secret(case: str) -> None:
    assert "hunter2" not in (BAD / case / "faults.txt").read_text()


def test_the_shipped_library_is_right() -> None:
    library = load_library(ROOT / "inventory")
    assert {"glm5", "tiny"} <= set(library.models)
    assert {"cutlass", "trtllm", "cutedsl", "triton", "flashinfer", "torch-native"} <= set(library.profiles)


def test_a_missing_folder_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models: is not a folder"):
        load_library(tmp_path)


def test_an_unreadable_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "profiles" / "p.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"p\.yaml: cannot be read: is a directory"):
        load_library(tmp_path)
