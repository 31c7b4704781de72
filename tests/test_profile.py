"""Models and profiles as files: tests/profiles/bad/<case>/ holds them with the whole text of their faults."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelswap import yamlfile
from kernelswap.errors import ConfigError
from kernelswap.profile import load_library, nearest

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


def test_nearest() -> None:
    assert nearest("cutlas", ["cutlass", "triton"]) == "did you mean `cutlass`?"
    assert nearest("zzz", ["b", "a"]) == "use one of: a, b"
    assert nearest("zzz", []) == "there is none yet; write its file first"


def _read(text: str) -> yamlfile.Document:
    document = yamlfile.Document("x.yaml")
    yamlfile.parse(text, document)
    return document


def test_yaml_1_2_has_no_norway_problem() -> None:
    document = _read("a: on\nb: no\nc: 1:30\nd: 2024-01-01\ne: true\nf: ~\ng:\nh: NO\n")
    assert document.value == {
        "a": "on",
        "b": "no",
        "c": "1:30",
        "d": "2024-01-01",
        "e": True,
        "f": None,
        "g": None,
        "h": "NO",
    }


@pytest.mark.parametrize("text", ["0.90", "1e-5", "1.50e+3", "0x10", "0o17", "1_000", "+5", "-0", "012", ".5", "5."])
def test_numbers_keep_their_text(text: str) -> None:
    value = (_read(f"a: {text}\n").value or {})["a"]
    assert value.text == text
    assert value == (
        int(text.replace("_", ""), 0 if text[:2] in ("0x", "0o") else 10)
        if "." not in text and "e" not in text
        else float(text)
    )


def test_lines_are_those_of_the_keys() -> None:
    document = _read("a:\n  b: 1\n  c:\n    - x\n    -\n      d: 5\n")
    assert document.where(("a", "b")) == "x.yaml:2: a/b"
    assert document.where(("a", "c", 0)) == "x.yaml:4: a/c/0"
    assert document.where(("a", "c", 1, "d")) == "x.yaml:6: a/c/1/d"
    assert document.where(("a", "missing")) == "x.yaml:1: a/missing"
    assert document.where(()) == "x.yaml"


def test_aliases_cannot_blow_up() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    assert any("too large" in fault.what for fault in _read(bomb).faults)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_but_never_crashes(text: str) -> None:
    document = _read(text)
    assert document.value is not None or document.faults
