from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from kernelswap.agent import files, host
from kernelswap.agent.containers import FoundContainer
from kernelswap.agent.host import Folders, FoundProcess, FoundUnit, Journal, ReleaseZero
from kernelswap.protocol import Plan, Report, Request, StepResult, encode

REQUEST = Request("20261130T000000Z-ab12", "main", "converge", "trtllm-0123456789ab", "ann@desk")


def test_the_journal_reads_back_as_written(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    zero = ReleaseZero((FoundUnit("my-glm.service", True),), (FoundProcess(("a", "b c"), {"K": "v\n"}, "/", 1, 2),))
    container = FoundContainer("docker", "c" * 64, "glm", "sglang:x", "on-failure:3", "2026", ports={"8000": 30000})
    zero = dataclasses.replace(zero, containers=(container,))
    journal = Journal(REQUEST, 1.5, "boot", step="stop", touched=True, previous="a-1", zero=zero)
    host.write_journal(folders, journal)
    assert host.read_journal(folders) == journal
    assert folders.journal.stat().st_mode & 0o077 == 0
    assert Journal(REQUEST, 1.5, "boot").zero == ReleaseZero()
    assert not ReleaseZero()


def test_a_journal_of_an_older_or_newer_agent_is_read(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    journal = Journal(REQUEST, 1.5, "boot", uptime=7.0, steps=(StepResult("drain", 0.1, True),))
    fields = json.loads(encode(journal))
    files.write(folders.journal, json.dumps({**fields, "newer": {"a": 1}, "steps": [{**fields["steps"][0], "x": 1}]}))
    assert host.read_journal(folders) == journal
    older = {key: fields[key] for key in ("request", "started", "boot", "step", "touched", "back", "previous", "cause")}
    files.write(folders.journal, json.dumps(older))
    assert host.read_journal(folders) == Journal(REQUEST, 1.5, "boot")


@pytest.mark.parametrize("text", ["", "{", "\0\0\0", "[]", "{}"])
def test_a_journal_that_cannot_be_read_is_no_missing_one(text: str, tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    files.write(folders.journal, text)
    with pytest.raises(host.JournalLost, match=r"see whether sglang-main\.service serves as it should"):
        host.read_journal(folders)
    files.write(folders.request, encode(REQUEST))
    journal = host.read_journal(folders)
    assert journal
    assert (journal.request, journal.step, journal.touched, journal.boot) == (REQUEST, "unknown", True, host.boot_id())


def test_torn_files_of_a_release(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    wanted = {name: hashlib.sha256(b"whole").hexdigest() for name in (folders.unit, "logging.json")}
    plan = Plan(
        "main",
        "a-1",
        "a",
        "m",
        "/p",
        (),
        {},
        "root",
        "/m",
        "m",
        "0.0.0.0",
        1,
        secret_flags=("api-key",),
        digests=wanted,
    )
    folder = folders.release("a-1")
    assert host.torn_files(folders, plan) == ["logging.json", folders.unit, "secrets.yaml"]
    files.write(folder / folders.unit, "whole")
    files.write(folder / "logging.json", "who")
    files.write(folder / "secrets.yaml", 'api-key: "s3')
    assert host.torn_files(folders, plan) == ["logging.json", "secrets.yaml"]
    files.write(folder / "logging.json", "whole")
    files.write(folder / "secrets.yaml", 'api-key: "s3"\n')
    assert host.torn_files(folders, plan) == []


def test_history_skips_a_torn_line(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    report = Report(REQUEST, "committed", 1.0, 2.0)
    files.append(folders.history, encode(report))
    with folders.history.open("a") as file:
        file.write(encode(report)[:30])
    files.append(folders.history, encode(report))
    assert host.history(folders) == [report, report]


def test_known_good(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    assert host.known_good(folders) is None
    folders.config.mkdir(parents=True)
    files.link(folders.known_good, "releases/a-1")
    assert host.known_good(folders) == "a-1"


def test_secrets(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    assert host.secrets(folders, "a-1") == {}
    files.write(folders.release("a-1") / "secrets.yaml", 'api-key: "s3: \\"x\\""\nadmin-api-key: "y"\n')
    assert host.secrets(folders, "a-1") == {"api-key": 's3: "x"', "admin-api-key": "y"}


def test_intact_means_committed_as_staged_and_nothing_over_it(tmp_path: Path) -> None:
    folders = Folders("main", tmp_path)
    files.write(folders.release("a-1") / folders.unit, "[Unit]\n")
    assert not host.is_intact(folders, "a-1")
    files.write(folders.committed_unit, "[Unit]\n")
    assert not host.is_intact(folders, "a-1")
    files.link(folders.known_good, "releases/a-1")
    assert host.is_intact(folders, "a-1")
    assert not host.is_intact(folders, "b-2")
    folders.candidate_settings.mkdir(parents=True)
    assert not host.is_intact(folders, "a-1")
    folders.candidate_settings.rmdir()
    files.write(folders.committed_unit, "[Unit]\n# edited\n")
    assert not host.is_intact(folders, "a-1")
