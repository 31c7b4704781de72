"""What SGLang would say to flags and variables; the lab compares it with SGLang itself."""

from pathlib import Path

import pytest

from kernelswap import flags, yamlfile
from kernelswap.sglang_opinions import Opinion, opinions

CASES = (Path(__file__).parent / "sglang_opinions.txt").read_text().splitlines()[1:]


def said(text: str, version: str, **environment: str) -> list[str]:
    document = yamlfile.Document("x.yaml")
    yamlfile.parse(text, document)
    given = document.value or {}
    assert not list(flags.findings(given))
    return [as_text(each) for each in opinions(given, environment, version)]


def as_text(opinion: Opinion) -> str:
    verdict = "refused" if opinion.refused else "warned"
    return f"{verdict} {'/'.join(map(str, opinion.loc[1:]))}: {opinion.what}; {opinion.todo}"


@pytest.mark.parametrize("case", CASES)
def test_flags(case: str) -> None:
    version, text, opinion = (part.strip() for part in case.split(" |", 2))
    assert said(text, version) == [opinion] * bool(opinion)


@pytest.mark.parametrize(
    ("version", "name", "opinion"),
    [
        ("0.5.23", "SGLANG_NSA_FUSE_TOPK", "has no effect in SGLang 0.5.23; write `SGLANG_DSA_FUSE_TOPK`"),
        ("0.5.10", "SGLANG_NSA_FUSE_TOPK", ""),
        ("0.5.23", "SGL_X", "is an old name in SGLang 0.5.23; write `SGLANG_X`"),
        ("0.5.22", "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE", ""),
        ("0.5.23", "SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE",
         "has no effect in SGLang 0.5.23; write `enable-prefill-delayer` under `flags`"),
        ("0.5.23", "SGLANG_ENABLE_SPEC_V2", "has no effect in SGLang 0.5.23; remove it"),
        ("0.5.23", "SGLANG_CACHE_DIR", ""),
    ],
)  # fmt: skip
def test_variables(version: str, name: str, opinion: str) -> None:
    assert said("", version, **{name: "1"}) == [f"warned {name}: {opinion}"] * bool(opinion)
