"""How drift is measured and judged, the server being the lab's stand-in; tests/lab/test_broken.py has the real one."""

from __future__ import annotations

import json
import math
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kernelswap.agent import host
from kernelswap.agent.client import Client, Unanswered
from kernelswap.agent.host import Folders
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import drift
from kernelswap.measured import DRIFT_FILE, DRIFT_REFERENCE_FILE, Drift, DriftReference, DriftVerdict, Scored
from kernelswap.protocol import DriftLimits, Plan, Request, Timeouts, Verify, decode, encode

Start = Callable[[str], Client]
NOISE = Drift(100, 1.0, None, 0.0, 0.0, 0.0, 0.0)


def scored(ids: list[int], given: int = 0, probability: float = 0.8) -> Scored:
    """Each token is the most probable one, and the next number is what is left."""
    logprobs = (math.log(probability), math.log(1 - probability))
    return Scored(
        tuple(ids), (logprobs[0],) * len(ids), tuple((token, token + 1) for token in ids), (logprobs,) * len(ids), given
    )


def reference(samples: tuple[Scored, ...] = (scored([1, 2, 3, 4], given=2),), release: str = "a-1") -> DriftReference:
    return DriftReference(release, "/m", "files", 1.0, "prompts", samples, NOISE)


@pytest.fixture(scope="module")
def real() -> Scored:
    return drift.parse(json.loads((Path(__file__).parent / "generate.json").read_text()))


def test_what_sglang_answers(real: Scored) -> None:
    assert real.given == 4  # the first of five tokens has no logprob
    assert real.ids == (298, 296, 418, 266, 464, 17, 333, 266)
    assert real.logprobs[3:5] == (-0.15368, -0.00715)
    assert real.top_ids[4] == (464, 477, 476)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
@pytest.mark.parametrize("rows", ["input_token_logprobs", "output_token_logprobs"])
def test_a_logprob_that_is_no_number(rows: str, value: float | None) -> None:
    answer = json.loads((Path(__file__).parent / "generate.json").read_text())
    answer["meta_info"][rows][2][0] = value
    with pytest.raises(drift.Garbled, match="no number"):
        drift.parse(answer)


@pytest.mark.parametrize("said", [None, 5, True, {}])
@pytest.mark.parametrize("lacks", ["output_token_logprobs", "output_top_logprobs"])
def test_an_answer_without_logprobs(lacks: str, said: object) -> None:
    answer = json.loads((Path(__file__).parent / "generate.json").read_text())
    answer["meta_info"][lacks] = said
    with pytest.raises(Unanswered):
        drift.parse(answer)


@pytest.mark.parametrize("rows", ["input_token_logprobs", "output_token_logprobs", "output_top_logprobs"])
def test_a_row_that_is_no_list(rows: str) -> None:
    answer = json.loads((Path(__file__).parent / "generate.json").read_text())
    answer["meta_info"][rows][2] = 7
    with pytest.raises(drift.Garbled, match="no number"):
        drift.parse(answer)


def test_the_same_answers(real: Scored) -> None:
    assert drift.compare([real], [real]) == Drift(8, 1.0, None, 0.0, 0.0, 0.0, 0.0)


def test_other_probabilities() -> None:
    found = drift.compare(
        [scored([1, 2, 3, 4], 2, 0.8)] * 3, [scored([1, 2, 3, 4], 2, 0.8)] * 2 + [scored([1, 2, 3, 4], 2, 0.6)]
    )
    difference = math.log(0.8 / 0.6)
    assert found.equal == 1
    assert found.mean_logprob == pytest.approx(difference / 3)
    assert found.worst_prompt == found.worst_logprob == pytest.approx(difference)
    assert found.kl == pytest.approx((0.8 * difference + 0.2 * math.log(0.2 / 0.4)) / 3, abs=1e-4)


def test_answers_that_part_count_up_to_there() -> None:
    found = drift.compare([scored([1, 2, 3, 4, 5, 6], given=1)], [scored([1, 2, 9, 7, 7, 7], given=1)])
    assert found.tokens == 3  # the prompt's, one equal one, and the one where they part
    assert found.equal == 1 / 5
    assert found.first_divergence == 1
    assert found.worst_logprob == pytest.approx(math.log(0.8 / 0.2))  # at most as probable as the least that was told


def test_a_prompt_that_became_other_tokens() -> None:
    with pytest.raises(drift.Incomparable, match="other tokens"):
        drift.compare([scored([1, 2, 3], given=2)], [scored([1, 9, 3], given=2)])


def test_the_divergence_is_never_more_than_over_all_tokens() -> None:
    dice = random.Random(1)  # noqa: S311
    for _ in range(500):
        old, new = ([dice.random() ** 8 for _ in range(40)] for _ in range(2))
        old, new = ([value / sum(values) for value in values] for values in (old, new))
        whole = sum(p * math.log(p / q) for p, q in zip(old, new))
        top = [
            {index: math.log(values[index]) for index in sorted(range(40), key=values.__getitem__)[-8:]}
            for values in (old, new)
        ]
        assert 0 <= drift.divergence(*top) <= whole + 0.01
    apart = drift.divergence({1: math.log(0.9), 2: math.log(0.09)}, {3: math.log(0.9), 4: math.log(0.001)})
    assert apart > 5


@pytest.mark.parametrize(
    ("noise", "allowed"),
    [
        (NOISE, {"equal": 0.5, "mean_logprob": 0.1, "worst_prompt": 0.5, "kl": 0.05}),
        (
            Drift(9, 0.88, 3, 0.03, 0.2, 2.0, 0.02),
            {"equal": 0.4, "mean_logprob": 0.15, "worst_prompt": 1.0, "kl": 0.1},
        ),
        (Drift(9, 0.1, 0, 0, 0, 0, 0), {"equal": 0.0, "mean_logprob": 0.1, "worst_prompt": 0.5, "kl": 0.05}),
    ],
)
def test_the_limits_follow_the_noise(noise: Drift, allowed: dict[str, float]) -> None:
    assert drift.allowance(DriftLimits(), noise) == pytest.approx(allowed)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (Drift(9, 0.9, 3, 0.04, 0.3, 12.0, 0.02), []),
        (Drift(9, 0.4, 3, 0.04, 0.3, 1.0, 0.02), ["40.0% equal tokens, at least 50.0%"]),
        (Drift(9, 0.9, 3, 0.11, 0.3, 1.0, 0.02), ["mean logprob difference 0.1100, limit 0.1000"]),
        (Drift(9, 0.9, 3, 0.04, 0.6, 1.0, 0.02), ["logprob difference in the worst prompt 0.6000, limit 0.5000"]),
        (Drift(9, 0.9, 3, 0.04, 0.3, 1.0, 0.06), ["KL 0.0600, limit 0.0500"]),
    ],
)
def test_each_figure_has_its_limit(figures: Drift, words: list[str]) -> None:
    found = drift.excess(figures, drift.allowance(DriftLimits(), NOISE))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found))


OTHERS = (scored([1, 2, 9, 8], given=2),)


@pytest.mark.parametrize(
    ("known_good", "verdict", "why"),
    [
        (None, "recorded", "nothing is stored"),
        (reference(), "pass", "0.0000"),
        (reference(OTHERS), "fail", "not those of a-1"),
        (replace(reference(OTHERS), model="/other"), "recorded", "a-1 was measured with another model"),
        (replace(reference(OTHERS), files="other"), "recorded", "other files of the model"),
        (replace(reference(OTHERS), prompts="other"), "recorded", "other prompts"),
        (reference((scored([7, 7, 9, 8], given=2),)), "recorded", "other tokens for the same prompts"),
    ],
)
def test_only_what_was_measured_alike_is_compared(known_good: DriftReference | None, verdict: str, why: str) -> None:
    found = drift.judge(reference(release="b-2"), known_good, "nothing is stored", DriftLimits())
    assert found.verdict == verdict
    assert why in found.why
    assert (found.limits is None) == (verdict == "recorded")


# With a server.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0123")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders("main", tmp_path)


def swap(folders: Folders, model: Path, server: Client, release: str, against: str | None, **limits: object) -> str:
    """The step, and what a commit keeps of it."""
    plan = Plan(
        "main", release, "b", "m", "/p", (), {}, "root", str(model), "m", "127.0.0.1", 1,
        verify=Verify(drift=replace(DriftLimits(), **limits)), timeouts=Timeouts(drift=9),  # type: ignore[arg-type]
    )  # fmt: skip
    evidence = folders.evidence(f"swap-{release}")
    evidence.mkdir(parents=True, exist_ok=True)
    seen, _ = drift.check(plan, server, folders, evidence, against)
    host.keep_measured(folders, Request(f"swap-{release}", "main", "converge", release, "ann"))
    return seen


def stored(folders: Folders, release: str) -> DriftReference:
    return decode(DriftReference, (folders.measured(release) / DRIFT_REFERENCE_FILE).read_text())


def disturb(folders: Folders, release: str, by: float) -> None:
    """As if the committed release had answered otherwise."""
    known = stored(folders, release)
    samples = [replace(one, logprobs=tuple(value - by for value in one.logprobs)) for one in known.samples]
    text = encode(replace(known, samples=tuple(samples)))
    (folders.measured(release) / DRIFT_REFERENCE_FILE).write_text(text)


def test_a_commit_keeps_what_the_next_is_compared_to(start: Start, folders: Folders, model: Path) -> None:
    server = start("")
    assert swap(folders, model, server, "a-1", None) == "there is no known-good to compare with"
    assert "100% equal tokens" in swap(folders, model, server, "b-2", "a-1")
    verdict = decode(DriftVerdict, (folders.evidence("swap-b-2") / DRIFT_FILE).read_text())
    assert (verdict.verdict, verdict.against, verdict.prompts) == ("pass", "a-1", 25)
    assert verdict.noise == verdict.own_noise == NOISE.numbers
    assert swap(folders, model, server, "c-3", "old-0") == "nothing is stored of old-0"


def test_a_difference_fails_with_its_numbers(start: Start, folders: Folders, model: Path) -> None:
    server = start("")
    swap(folders, model, server, "a-1", None)
    disturb(folders, "a-1", 0.2)
    with pytest.raises(Failed) as failure:
        swap(folders, model, server, "b-2", "a-1")
    assert "mean logprob difference 0.2000, limit 0.1000" in failure.value.cause.what
    assert failure.value.cause.blame == "release"
    assert failure.value.numbers["mean_logprob"] == pytest.approx(0.2)
    assert decode(DriftVerdict, (folders.evidence("swap-b-2") / DRIFT_FILE).read_text()).verdict == "fail"
    # Where it is meant, it is told, and the next is compared to the new one.
    assert "not those of a-1" in swap(folders, model, server, "b-2", "a-1", policy="note")
    assert "100% equal tokens" in swap(folders, model, server, "c-3", "b-2")


def test_a_release_is_not_to_blame_for_other_weights(start: Start, folders: Folders, model: Path) -> None:
    server = start("")
    swap(folders, model, server, "a-1", None)
    disturb(folders, "a-1", 0.2)
    (model / "model.safetensors").write_bytes(b"4567")
    with pytest.raises(Failed) as failure:
        swap(folders, model, server, "b-2", "a-1")
    assert failure.value.cause.blame == "host"
    assert "written since" in failure.value.cause.what
    (model / "model.safetensors").write_bytes(b"of another size")
    assert "other files of the model" in swap(folders, model, server, "b-2", "a-1")


def test_a_server_that_computes_no_numbers(start: Start, folders: Folders, model: Path) -> None:
    with pytest.raises(Failed, match="no number"):
        swap(folders, model, start("nan"), "a-1", None)


def test_a_server_that_does_not_answer(folders: Folders, model: Path, start: Start, unused_port: int) -> None:
    nobody = Client(f"http://127.0.0.1:{unused_port}", "m")
    assert "none recorded" in swap(folders, model, nobody, "a-1", None)
    assert not folders.measured("a-1").exists()
    swap(folders, model, start(""), "a-1", None)
    with pytest.raises(Failed, match="refused"):
        swap(folders, model, nobody, "b-2", "a-1")


def test_a_server_that_hangs_is_not_waited_for_as_long_as_all_answers_may_take(model: Path) -> None:
    plan = Plan(
        "main", "a-1", "b", "m", "/p", (), {}, "root", str(model), "m", "127.0.0.1", 1,
        timeouts=Timeouts(smoke=0.2, drift=60),
    )  # fmt: skip
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unanswered, match="timed out"):
        drift.measure(plan, Client(f"http://127.0.0.1:{silent.getsockname()[1]}", "m"))
    assert time.monotonic() - begin < 30


def test_ones_own_prompts(start: Start, folders: Folders, model: Path, tmp_path: Path) -> None:
    server, path = start(""), tmp_path / "prompts.json"
    path.write_text('["one", "two"]')
    swap(folders, model, server, "a-1", None, prompts=str(path))
    assert len(stored(folders, "a-1").samples) == 2
    path.write_text('["one", "three"]')
    assert "other prompts" in swap(folders, model, server, "b-2", "a-1", prompts=str(path))


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[""]'])
def test_prompts_that_are_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    plan = Plan("main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "127.0.0.1", 1)
    plan = replace(plan, verify=Verify(drift=DriftLimits(prompts=str(path))))
    (fault,) = drift.faults(plan)
    assert fault.what.startswith(f"{path}: is no JSON")
    path.unlink()
    (fault,) = drift.faults(plan)
    assert str(fault) == f"{path}: No such file or directory: put it there, or change `prompts` of verify.drift"
    assert drift.faults(replace(plan, verify=Verify(drift=None))) == []
