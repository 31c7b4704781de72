from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import recorded

from kernelswap.agent.verify import gates
from kernelswap.protocol import DriftLimits, Evidence
from kernelswap.report import words
from kernelswap.report.data import OUTPUT, Compared, Metric, Range, Story, changes, story
from kernelswap.report.text import data, text

Told = Callable[[str], Story]


@pytest.mark.parametrize(
    ("case", "outcome", "sentence"),
    [
        (
            "committed",
            "Committed",
            "1,317 output tok/s at concurrency 64, 23.8% above cutlass-1a2b3c4d5e (+- 3.1%); "
            "98.4% of tokens as before.",
        ),
        (
            "throughput",
            "Rolled back",
            "throughput failed: 900.1 output tok/s at 64 concurrent requests, 14.9 % below cutlass-1a2b3c4d5e; noise "
            "explains 3.1 %. cutlass-1a2b3c4d5e serves again, verified.",
        ),
        (
            "crash",
            "Rolled back",
            "ready failed: ModuleNotFoundError: No module named 'flashinfer'. "
            "cutlass-1a2b3c4d5e serves again, verified.",
        ),
        (
            "refused",
            "Refused",
            "2 faults. Nothing was touched.",
        ),
    ],
)
def test_the_verdict_is_one_sentence(told: Told, case: str, outcome: str, sentence: str) -> None:
    found = told(case)
    assert words.outcome(found) == outcome
    assert words.sentence(found) == sentence


def test_the_headline_is_of_the_concurrency_that_decided_and_says_what_the_gate_says(told: Told) -> None:
    found = told("committed")
    verdict = found.throughput
    assert verdict
    assert verdict.baseline
    here, there = verdict.candidate.points[1], verdict.baseline.points[1]
    unclear = replace(verdict, verdict="inconclusive", concurrency=here.concurrency, margin=0.069)
    said = words.sentence(replace(found, throughput=unclear))
    assert f"{here.median:,.1f} output tok/s at concurrency {here.concurrency}, " in said
    assert f"{gates.difference(here, there):.1%} above cutlass-1a2b3c4d5e (+- 6.9%, inconclusive); " in said
    row = next(row for row in found.compared if row.concurrency == here.concurrency and row.metric == OUTPUT)
    assert row.change == gates.difference(here, there) != here.median / there.median - 1


@pytest.mark.parametrize(
    ("case", "figures"),
    [
        (
            "committed",
            [
                ("Output tok/s at 64", "1,317", "good"),
                ("TTFT median at 64", "754.2 ms", "good"),
                ("ITL median at 64", "46.1 ms", "good"),
                ("Same tokens", "98.4%", "good"),
                ("Swap took", "8 min 18 s", ""),
            ],
        ),
        (
            "crash",
            [("Output tok/s", words.UNKNOWN, ""), ("Same tokens", words.UNKNOWN, ""), ("Swap took", "9 min 11 s", "")],
        ),
        ("refused", [("Swap took", "6.2 s", "")]),
    ],
)
def test_figures(told: Told, case: str, figures: list[tuple[str, str, str]]) -> None:
    assert [(f.label, f.value, f.tone) for f in words.figures(told(case))] == figures


def test_a_server_was_away_from_its_stop_to_its_opening(told: Told) -> None:
    *_, took = words.figures(told("committed"))
    assert took.note == "8 min 09 s not reachable"
    *_, took = words.figures(told("refused"))
    assert took.note == "nothing was stopped"


def three(low: float, middle: float, high: float) -> Range:
    return Range(middle, low, high, 3)


@pytest.mark.parametrize(
    ("metric", "before", "after", "judged", "change"),
    [
        (OUTPUT, three(98, 100, 102), three(109, 110, 111), "better", 0.1),
        (OUTPUT, three(98, 100, 102), three(89, 90, 91), "worse", -0.1),
        (OUTPUT, three(98, 100, 102), three(101, 104, 106), "same", 0.04),
        (Metric("TTFT median", "ms"), three(98, 100, 102), three(109, 110, 111), "worse", 0.1),
        (OUTPUT, Range(100, 100, 100), three(109, 110, 111), "", 0.1),
        (OUTPUT, None, three(109, 110, 111), "", None),
        (OUTPUT, three(98, 100, 102), None, "", None),
    ],
)
def test_only_what_the_spread_does_not_explain_is_better_or_worse(
    metric: Metric, before: Range | None, after: Range | None, judged: str, change: float | None
) -> None:
    row = Compared(64, metric, before, after)
    assert row.judged == judged
    assert row.change == (None if change is None else pytest.approx(change))


def test_flags_as_declared_and_as_sglang_made_them() -> None:
    told = recorded.report("committed", recorded.steps())
    assert [str(change) for change in changes(told, recorded.PLANS, recorded.RESOLVED)] == [
        "cuda-graph-max-bs: 128 -> (unset: 256)",
        "moe-runner-backend: flashinfer_cutlass -> flashinfer_trtllm",
        "chunked_prefill_size: 8192 -> 16384",
    ]
    # Of a release that is gone nothing is known, and nothing is told.
    assert list(changes(told, recorded.PLANS[1:], recorded.RESOLVED[1:])) == []


def test_gpus_are_told_while_they_were_loaded(told: Told) -> None:
    found = {gpu.gpu: gpu for gpu in told("committed").gpus}
    assert list(found) == [str(i) for i in range(8)]
    assert found["5"].throttle == ("sw_thermal_slowdown",)
    assert found["0"].throttle == ()
    # A sample without a power is none of 0 W.
    power = found["7"].power
    assert power is not None
    assert power == pytest.approx(found["6"].power, rel=0.05)


def test_a_finding_stands_once_where_it_weighs_most(told: Told) -> None:
    found = told("committed").findings
    assert len({finding.name for finding in found}) == len(found)
    assert "GPU 5" in found[0].headline


def test_what_the_known_good_did_before_its_stop_is_no_finding_of_the_candidate(told: Told) -> None:
    bare = recorded.report("committed", recorded.steps())
    rows = list(recorded.gpu_csv(recorded.START))
    before = [rows[0], *(row.replace(",", ",baseline ", 1) for row in rows[1:])]

    def found(*lines: str) -> Story:
        return story("gpu-01", Evidence(report=bare, files={"gpu.csv": "\n".join(lines)}))

    assert found(*rows).findings
    assert found(*before).findings == ()
    assert len(found(*before).samples) > 100, "the timeline has them"


def test_every_limit_of_drift_has_its_row(told: Told) -> None:
    rows = {row.name: (row.value, row.limit, row.judged) for row in words.drift_rows(told("committed"))}
    assert set(DriftLimits.__dataclass_fields__) & set(words.DRIFT) == {"mean_logprob", "worst_prompt", "kl"}
    assert rows["Mean logprob difference of the worst prompt, nats"] == ("0.084", "at most 0.5", "within")
    assert rows["KL over the top tokens, nats"] == ("0.00093", "at most 0.05", "within")
    assert rows["Worst logprob difference, nats"] == ("0.284", "", "")


def test_nothing_but_a_report_is_a_story() -> None:
    bare = recorded.report("down", (), detail="nothing serves", evidence="")
    found = story("gpu-01", Evidence(report=bare))
    assert words.sentence(found) == "nothing serves."
    assert found.throughput is None
    assert found.findings == found.samples == found.steps == ()
    with pytest.raises(ValueError, match="no such swap"):
        story("gpu-01", Evidence())


@pytest.mark.parametrize("name", ["throughput.json", "drift.json", "gpu.csv", "metrics.csv", "bench.jsonl"])
@pytest.mark.parametrize("content", ["", "{torn", '{"a": 1}', "[1]", "\x00"])
def test_what_cannot_be_read_is_said_and_spoils_nothing_else(told: Told, name: str, content: str) -> None:
    files = {name: content}
    report = recorded.report("committed", recorded.steps())
    found = story("gpu-01", Evidence(report=report, files=files))
    assert [line.partition(":")[0] for line in found.unread] == (
        [] if (name, content) == ("bench.jsonl", "") else [name]
    )
    assert words.sentence(found).startswith("It answered right; its throughput was not measured")


def test_a_swap_of_before_the_ladder_still_tells_its_rate() -> None:
    numbers = {"output_tok_s": 225.25, "concurrency": 8.0}
    done = tuple(replace(step, numbers=numbers) if step.name == "throughput" else step for step in recorded.steps())
    found = story("gpu-01", Evidence(report=recorded.report("committed", done)))
    assert words.sentence(found) == "225.2 output tok/s at concurrency 8; the known-good's was not measured."


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.04, "0.0 s"), (99.94, "99.9 s"), (119.6, "2 min 00 s"), (3599.9, "1 h 00 min"), (7265, "2 h 01 min")],
)
def test_durations(seconds: float, says: str) -> None:
    assert words.duration(seconds) == says


def test_text_says_the_same(told: Told) -> None:
    for case in recorded.CASES:
        found = told(case)
        said = text(found)
        assert said.startswith(
            f"{words.outcome(found)}: {found.report.request.release} on gpu-01\n{words.sentence(found)}\n"
        )
        assert all(step.name in said for step in found.steps)
    assert "Output, tok/s" in text(told("committed"))
    assert "(unset: 256)" in text(told("committed"))


def test_data_is_all_but_the_curves(told: Told) -> None:
    found = data(told("committed"))
    assert found["verdict"].startswith("1,317 output tok/s")
    assert found["report"]["outcome"] == "committed"
    assert {"change", "judged", "before", "after"} <= set(found["compared"][0])
    assert found["drift"]["equal"] == 0.984
    assert "samples" not in found
