"""Every log under logs/ begins with the expected verdict: `# signature | the line that is the cause`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelswap.agent import causes, logs, signatures

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))
LINES = [line.split(" | ", 1) for line in (Path(__file__).parent / "logs/lines.txt").read_text().splitlines()]


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_cause_of_a_log(path: Path) -> None:
    with path.open("rb") as file:
        signature, _, what = file.readline().decode().strip("# \n").partition(" | ")
        cause = causes.find(logs.read(file), signatures.load(), "here")
    if signature == "none":
        assert cause is None
    else:
        assert cause is not None
        assert (cause.signature, cause.what) == (signature, what)


@pytest.mark.parametrize(("signature", "line"), LINES)
def test_cause_of_a_line(signature: str, line: str) -> None:
    """Where no whole log is kept: the line as the last of a scheduler's traceback, or for what it is."""
    header = "[2026-11-30 02:30:45 TP1] Scheduler hit an exception: Traceback (most recent call last):"
    for text in ([header, '  File "x.py", line 1, in f', line], [f"Nov 30 02:30:00 gpu1 python3[7]: {line}"]):
        cause = causes.find(text, signatures.load(), "here")
        assert cause is not None
        assert (cause.signature, cause.what) == (signature, line)


def test_every_signature_is_tried() -> None:
    tried = {signature for signature, _ in LINES}
    tried |= {path.open("rb").readline().decode().strip("# \n").partition(" | ")[0] for path in LOGS}
    assert {row.id for row in signatures.load().signatures} <= tried


def test_there_are_logs_of_every_kind() -> None:
    verdicts = [path.open("rb").readline().decode().strip("# \n").partition(" | ")[0] for path in LOGS]
    assert verdicts.count("none") >= 15
    assert verdicts.count("unknown") >= 8
    assert len(verdicts) >= 100


def test_every_signature_names_its_source_and_way_out() -> None:
    table = signatures.load()
    for row in table.signatures:
        assert row.source
        assert row.todo
        assert row.blame in ("release", "host")
        assert row.memory in ("", "more", "less")
    ids = [row.id for row in table.signatures]
    assert len(ids) == len(set(ids))


def test_a_cause_says_where_it_stands_and_whether_to_try_again() -> None:
    lines = ["\n", "Traceback (most recent call last):\n", "FileExistsError: [Errno 17] File exists: '/x/tmp'\n"]
    cause = causes.find(lines, signatures.load(), "server.log")
    assert cause is not None
    assert (cause.where, cause.line, cause.retry, cause.blame) == ("server.log", 3, True, "host")
    unknown = causes.find(["flux.CapacitorError: 1.21 gigawatts"], signatures.load(), "server.log")
    assert unknown is not None
    assert (unknown.signature, unknown.line) == ("unknown", 1)
    assert "from line 1 on" in unknown.todo


def test_line_numbers_and_addresses_do_not_matter() -> None:
    text = "RuntimeError: Error in function 'TllmGenFmhaRunner' at {}/fmhaRunner.cuh:{}: Unsupported architecture"
    found = [causes.find([text.format(*place)], signatures.load(), "") for place in (("/a", 30), ("/workspace/b", 371))]
    assert [cause.signature for cause in found if cause] == ["trtllm-arch", "trtllm-arch"]


def test_a_long_quiet_log_is_not_kept_in_memory() -> None:
    """100 MB of it would be; what the story holds is a handful of failures."""
    story = causes._Story(signatures.load())
    handled = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "ValueError: once more"]
    alive = '[2026-11-30 02:30:00] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK'
    for number, raw in enumerate([*handled, alive] * 5000, 1):
        for line in logs.parse(number, raw):
            story.read(line)
    assert not story.failures
    assert not story.open


@pytest.mark.parametrize(
    ("before", "after", "advances"),
    [
        ([], ["[2026-11-30 02:30:00 TP0] Load weight begin. avail mem=1 GB"], True),
        (["[2026-11-30 02:30:00 TP0] Load weight begin."], ["[2026-11-30 02:40:00 TP0] Load weight begin."], False),
        (["[2026-11-30 02:30:00 TP0] Load weight begin."], ["[2026-11-30 02:30:00 TP1] Load weight begin."], True),
        (
            ["Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:11<00:11,  5.61s/it]"],
            ["Loading safetensors checkpoint shards:  50% Completed | 2/4 [09:11<09:11,  5.61s/it]"],
            False,
        ),
        (
            ["Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:11<00:11,  5.61s/it]"],
            ["Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:12<00:04,  5.61s/it]"],
            True,
        ),
        (
            ["Capturing batches (bs=256 avail_mem=5.35 GB):   3%|3         | 1/36 [00:02<01:20,  2.30s/it]"],
            ["Capturing batches (bs=256):   3%|3  | 1/36 [00:02]\rCapturing batches (bs=1):  6%| | 2/36"],
            True,
        ),
        ([], ["DeepGEMM warmup:  12%|#2        | 2048/16384 [01:00<06:00, 40.1it/s]"], True),
        ([], ["2026-11-30 02:30:44,853 - INFO - flashinfer.jit: Loading JIT ops: batch_prefill_bf16"], True),
        ([], ["[2026-11-30 02:30:00 TP0] waiting for the lock", "hello"], False),
    ],
)
def test_only_a_line_that_advances_is_progress(before: list[str], after: list[str], advances: bool) -> None:
    watch = causes.Watch(signatures.load(), "")
    watch.advanced(before)
    assert watch.advanced([*before, *after]) is advances
    assert watch.doom is None


def test_an_error_that_no_server_survives_dooms_a_start_that_stands_still() -> None:
    error = ["Traceback (most recent call last):", "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"]
    watch = causes.Watch(signatures.load(), "here")
    assert watch.advanced(["Load weight begin."])
    looks = [watch.advanced(["Load weight begin.", *error]), watch.doom]
    assert looks == [False, None]
    assert not watch.advanced(["Load weight begin.", *error, "hello"])
    assert watch.doom is not None
    assert watch.doom.signature == "no-ninja"


def test_an_error_after_which_the_start_goes_on_dooms_nothing() -> None:
    log = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory."]
    watch = causes.Watch(signatures.load(), "here")
    for step in ("Load weight begin.", "Load weight end."):
        watch.advanced(log)
        log = [*log, step]
        assert watch.advanced(log)
    watch.advanced(log)
    assert watch.doom is None
