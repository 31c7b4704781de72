import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelswap import yamlfile


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
