"""What is known of SGLang's releases: every snapshot reads, and every rename leads to a flag that is there."""

import pytest

from kernelswap import sglang
from kernelswap.sglang_opinions import TYPES

RENAMES = sglang.renames()


@pytest.mark.parametrize("version", sglang.versions())
def test_every_snapshot_reads_and_is_its_version(version: str) -> None:
    release = sglang.release(version)
    assert len(release.described) > 250
    assert list(release.described) == sorted(release.described)
    for name in release.described:
        flag = release.flag(name)
        assert flag.type in TYPES and not (flag.bare and flag.choices)
    assert release.flag("tp-size").type == "int" and release.flag("trust-remote-code").bare
    assert "triton" in release.flag("moe-runner-backend").choices


def test_many_releases_are_known() -> None:
    assert {"0.5.4", "0.5.10", "0.5.13", "0.5.18", "0.5.23"} <= set(sglang.versions())
    assert sglang.newest().version == sglang.versions()[-1]


@pytest.mark.parametrize(
    ("version", "used"), [("0.5.10", "0.5.10"), ("0.5.10.post1", "0.5.10"), ("0.4.9", "0.5.4"), ("0.9", "0.5.23")]
)
def test_an_unknown_release_is_taken_for_the_last_one_before_it(version: str, used: str) -> None:
    assert sglang.nearest_to(version).version == used


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tp-size", "tp-size"),
        ("tensor-parallel-size", "tp-size"),
        ("tp", "tp-size"),
        ("nnode", "nnodes"),
        ("no-dllm-fdfo", "dllm-fdfo"),
        ("cuda-graph-max-bs", None),
        ("", None),
        ("nothing", None),
    ],
)
def test_the_flag_that_a_word_stands_for(written: str, meant: str | None) -> None:
    assert sglang.release("0.5.23").name(written) == meant


@pytest.mark.parametrize(
    "row", [*RENAMES["renames"], *RENAMES["foreign"]], ids=lambda row: " ".join(map(str, row.values()))[:60]
)
def test_every_rename_leads_somewhere(row: dict[str, str]) -> None:
    assert row["source"] and row.get("action", "gone") in ("alias", "warning", "error", "gone")
    new = row.get("renamed_to", "")
    if not new or row.get("environment"):
        return
    having = [sglang.release(version) for version in sglang.versions()]
    if "value" in row:
        choices = having[-1].flag(row["flag"]).choices
        assert new in choices
        assert row["value"] not in choices or row["action"] != "gone"
    else:
        assert any(new.split(":")[0] in release.spellings for release in having)


def test_every_flag_that_a_release_lost_has_a_row() -> None:
    known = {row.get("flag") for row in RENAMES["renames"]}
    lost = {name for version in sglang.versions() for name in sglang.release(version).described}
    assert lost - set(sglang.newest().spellings) <= known
