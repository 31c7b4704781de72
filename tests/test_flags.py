"""The speller: a `flags:` map becomes words, and argparse gets back what was written."""

import argparse
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelswap import flags, sglang, yamlfile

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


def words_of(value: dict[str, Any]) -> tuple[str, ...]:
    return tuple(word for group in flags.groups(value) for word in group)


def from_yaml(text: str) -> dict[str, Any]:
    document = yamlfile.Document("x.yaml")
    yamlfile.parse(text, document)
    assert not document.faults
    return document.value or {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("enable-metrics: true", ("--enable-metrics",)),
        ("enable-metrics: false", ()),
        ("enable-metrics: null", ()),
        ("tp-size: 8", ("--tp-size", "8")),
        ("mem-fraction-static: 0.90", ("--mem-fraction-static", "0.90")),
        ("rate: 1e-5", ("--rate", "1e-5")),
        ("switch: on", ("--switch", "on")),
        ("empty: ''", ("--empty", "")),
        ("quoted: 'true'", ("--quoted", "true")),
        ("lines: |\n  a\n  b\n", ("--lines", "a\nb\n")),
        ("cuda-graph-bs-decode: [1, 2, 4]", ("--cuda-graph-bs-decode", "1", "2", "4")),
        ("loras: [{lora_name: a, lora_path: /x}]", ("--loras", '{"lora_name":"a","lora_path":"/x"}')),
        ("args: {z: 1, a: {b: [true, null]}, x: 0.90}", ("--args", '{"z":1,"a":{"b":[true,null]},"x":0.90}')),
        ("args: {name: 東京}", ("--args", '{"name":"東京"}')),
        ("args: {a: 0x10, b: 1_000, c: .5, d: +1}", ("--args", '{"a":16,"b":1000,"c":0.5,"d":1}')),
        ("watchdog-timeout: -1", ("--watchdog-timeout=-1",)),
        ("chat-template: --x", ("--chat-template=--x",)),
        ("date: 2024-01-01", ("--date", "2024-01-01")),
    ],
)
def test_spelling(written: str, words: tuple[str, ...]) -> None:
    value = from_yaml(written)
    assert not list(flags.findings(value))
    assert words_of(value) == words


def test_words_do_not_depend_on_the_order_of_the_file() -> None:
    assert words_of({"b": 1, "a": True}) == words_of({"a": True, "b": 1}) == ("--a", "--b", "1")


def test_display() -> None:
    value = {"b": ["x y", 2], "a": True, "c": {"k": 1}, "gone": None, "off": False, "e": ""}
    assert flags.display(value) == {"a": "true", "b": "'x y' 2", "c": '{"k":1}', "e": ""}


def test_display_knows_every_spelling() -> None:
    value = {"tensor-parallel-size": 8, "no-enable-tf32-matmul": True, "of-a-fork": True}
    assert flags.display(value) == {"tp-size": "8", "enable-tf32-matmul": "false", "of-a-fork": "true"}


@pytest.mark.parametrize(
    ("given_flags", "count"),
    [
        ({}, 1),
        ({"tp-size": 8}, 8),
        ({"tp": "4", "pipeline-parallel-size": 2}, 8),
        ({"tp-size": 4, "dp-size": 2}, 8),
        ({"tp-size": 8, "dp-size": 8, "enable-dp-attention": True}, 8),
        ({"tp-size": "many"}, 1),
    ],
)
def test_schedulers(given_flags: dict[str, flags.FlagValue], count: int) -> None:
    assert flags.schedulers(given_flags) == count


def test_too_long_a_word_is_a_finding() -> None:
    assert "is 131072 bytes long" in next(flags.findings({"a": "x" * 131072}))[1]
    assert not list(flags.findings({"a": "x" * 131071}))


@pytest.mark.parametrize(
    "written",
    [
        "nnodes: 2",
        "nnodes: '2'",
        "nnodes: [2]",
        "nnodes: true",
        "nnode: 2",
        "nn: 2",
        "node-rank: 1",
        "disaggregation-mode: prefill",
        "disaggregation-mode: [decode]",
        "disaggregation-m: prefill",
        "dist-init-addr: 10.0.0.1:5000",
        "nccl-init-addr: 10.0.0.1:5000",
        "dist-i: 10.0.0.1:5000",
        "use-ray: true",
        "encoder-only: true",
        "elastic-ep-rejoin: true",
        "base-gpu-id: 4",
        "gpu-id-step: 2",
        "ssl-certf: /x",
        "grpc-port: 1",
        "gated-launch-port: 1",
        "delete-ckpt: true",
        "help: true",
    ],
)
def test_what_breaks_our_assumptions_is_refused_by_name_in_every_spelling(written: str) -> None:
    value = from_yaml(written)
    (name,) = value
    ((loc, what, todo),) = flags.findings(value)
    assert loc == (name,)
    assert what.endswith("is beyond what Kernelswap supports")
    assert todo in flags.REFUSED.values()


@pytest.mark.parametrize(
    "written", ["nnodes: 1", "nnodes: [1]", "disaggregation-mode: 'null'", "node-rank: 0", "nnodes: null"]
)
def test_what_says_no_more_than_the_default_is_taken(written: str) -> None:
    assert not list(flags.findings(from_yaml(written)))


@pytest.mark.parametrize("written", ["disaggregation_mode: prefill", "--nnodes: 2", "--disaggregation-m: prefill"])
def test_another_spelling_hides_no_refusal(written: str) -> None:
    ((_, what, todo),) = flags.findings(from_yaml(written))
    assert what == "is not spelled as Kernelswap spells flags"
    assert todo.endswith("but multi-node and prefill/decode groups are not supported yet; serve on one host")


@pytest.mark.parametrize("written", ["po: 1", "model-p: /x", "served: x", "api: x", "tensor: 2\ntp-size: 2"])
def test_short_names_are_seen_through(written: str) -> None:
    ((_, what, _todo),) = flags.findings(from_yaml(written))
    assert what.startswith("Kernelswap sets --") or "is another spelling of" in what


def test_every_flag_of_ours_is_one_of_sglangs() -> None:
    known = {name for version in sglang.versions() for name in sglang.release(version).spellings}
    assert {*flags.OWNED, *flags.REFUSED} <= known


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), {"a": b"x"}, {1: "x"}])
def test_python_data_that_no_flag_can_hold_is_a_finding(value: object) -> None:
    assert list(flags.findings({"a": value}))


@settings(deadline=None)
@given(TEXT)
def test_argparse_gets_the_text_back(text: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--a")
    parser.add_argument("--other", action="store_true")
    assert parser.parse_args(words_of({"a": text, "other": True})).a == text


@settings(deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_json_says_the_same_and_keeps_the_order(value: dict[str, Any]) -> None:
    word = flags.text(value)
    assert json.loads(word) == value
    assert list(json.loads(word)) == list(value)


@settings(deadline=None)
@given(st.dictionaries(TEXT | st.integers(), JSON | st.binary() | st.lists(JSON), max_size=5))
def test_findings_never_crash_and_what_passes_can_be_spelled(value: dict[Any, Any]) -> None:
    if not list(flags.findings(value)):
        assert all("\0" not in word for word in words_of(value))
