"""Files of many makers: what they say is read, and what they do not say is not known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kernelswap import traces
from kernelswap.traces import Bench, Unreadable

NVIDIA_SMI = (Path(__file__).parent / "traces/nvidia_smi.csv").read_text()


def test_what_nvidia_smi_prints() -> None:
    first, second, third = traces.read_gpus(NVIDIA_SMI).samples
    assert (first.gpu, first.name) == ("0", "NVIDIA RTX PRO 6000 Blackwell Server Edition")
    assert (first.utilization, first.memory_utilization, first.power, first.power_limit) == (98, 40, 329.12, 600)
    assert (first.sm_clock, first.sm_clock_max, first.reasons, first.temperature) == (2280, 2430, 0, 58)
    assert (first.memory_used, first.memory_total, first.phase) == (90004, 97887, "")
    assert (second.gpu, second.power, second.reasons) == ("1", None, 4), "[N/A] is not 0 W"
    assert third.reasons is None
    assert third.time - first.time == pytest.approx(0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(", ", ";"),
        lambda text: text.replace(", ", "\t"),
        lambda text: text.replace(", ", "|"),
        lambda text: re.sub(r"(\d)\.(?=\d+( W)?;)", r"\1,", text.replace(", ", ";")),
        lambda text: "# made by nvidia-smi\n\n" + text,
        lambda text: "$ nvidia-smi --query-gpu=timestamp,index --format=csv\nWarning: no persistence\n" + text,
        lambda text: text + text.splitlines()[0] + "\n",
        lambda text: text.replace(" %,", ",").replace(" W,", ",").replace(" MHz,", ",").replace(" MiB,", ","),
        lambda text: text.replace("clocks_event_reasons", "clocks_throttle_reasons").replace("[%]", "(%)"),
    ],
)
def test_other_spellings_of_the_same(change: Any) -> None:
    assert traces.read_gpus(change(NVIDIA_SMI)).samples == traces.read_gpus(NVIDIA_SMI).samples


def one(header: str, *rows: str) -> traces.Sample:
    return traces.read_gpus("\n".join([header, *rows]) + "\n").samples[0]


@pytest.mark.parametrize(
    ("header", "row", "field", "value"),
    [
        ("time,gpu_util,power_mw", "0,98,330000", "power", 330),
        ("time,util,power", "0,98,330000", "power", 330),
        ("time,utilization", "0,0.98", "utilization", 98),
        ("time,util,pcie.rx [KB/s]", "0,98,12000000", "pcie_rx", 12000),
        ("time,util,pcie_rx_kb_s", "0,98,12000000", "pcie_rx", 12000),
        ("time,util,pcie_tx", "0,98,12000000", "pcie_tx", 12000),
        ("time,util,rxpci [MB/s]", "0,98,12000", "pcie_rx", 12000),
        ("time,util,memory.used [GiB]", "0,98,80", "memory_used", 81920),
        ("time,util,throttle_reasons", "0,98,SwPowerCap|HwThermalSlowdown", "reasons", 0x44),
        ("time,util,throttle_reasons", "0,98,none", "reasons", 0),
        ("time,util,throttle_reasons", "0,98,[N/A]", "reasons", None),
        ("time,util,throttle_reasons", "0,98,4", "reasons", 4),
        (
            "time,util,clocks_throttle_reasons.sw_power_cap,clocks_throttle_reasons.hw_thermal_slowdown",
            "0,98,Active,Not Active",
            "reasons",
            4,
        ),
        ("time,util,clocks_throttle_reasons.sw_power_cap", "0,98,[Not Supported]", "reasons", None),
        ("time,util,power", "0,98,ERR!", "power", None),
        ("time,util,power", "0,98,", "power", None),
        ("time,util,power", "0,98,nan", "power", None),
        ("time,util,power", "0,98,-1", "power", None),
        ("time,power,util", "0,300,4294967295", "utilization", None),
        ("time,util,power", "0,98,1e308", "power", None),
        ("time,util,clocks.max.sm [GHz]", "0,98,1.98", "sm_clock_max", 1980),
        ("ts,util", "1764496800123,98", "time", 1764496800.123),
        ("ts,util", "2025-11-30T10:00:00Z,98", "time", 1764496800),
        ("ts,util", "2025-11-30T10:00:00.25+00:00,98", "time", 1764496800.25),
        ("ts,util", "00:00:01.5,98", "time", -2208988798.5),
        ("gpu,util", "3,98", "time", 0),
    ],
)
def test_units_words_and_times(header: str, row: str, field: str, value: Any) -> None:
    found = getattr(one(header, row), field)
    assert found == (value if value is None else pytest.approx(value))


def test_dmon_and_a_file_without_times() -> None:
    head = (
        "# gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk  rxpci  txpci\n"
        "# Idx      W      C      C      %      %    MHz    MHz   MB/s   MB/s\n"
    )
    row = "    {}    330     58      -     98     40  12481   2280    900    850\n"
    trace = traces.read_gpus(head + "".join(map(row.format, (0, 1, 0, 1))))
    assert [(item.gpu, item.time) for item in trace.samples] == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert (trace.samples[0].power, trace.samples[0].utilization, trace.samples[0].pcie_tx) == (330, 98, 850)
    assert any("each round of samples is taken as a second" in note for note in trace.notes)
    assert any("no column enforced.power.limit" in note for note in trace.notes)


def test_columns_of_the_server_in_the_same_file() -> None:
    trace = traces.read_gpus("time,gpu,util,num_running_reqs,token_usage\n1,0,98,41,0.98\n1,1,97,41,0.98\n")
    assert [(item.running, item.token_usage) for item in trace.server] == [(41, 0.98)]


def test_times_of_day_go_on_after_midnight() -> None:
    found = traces.read_gpus("time,util\n23:59:58,98\n23:59:59,98\n00:00:01,97\n").samples
    assert [sample.time - found[0].time for sample in found] == [0, 1, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time,util\n", "no row"),
        ("time,util\nyesterday,98\n", "no time can be read, as 'yesterday'"),
        ("1,2\n", "noheader"),
    ],
)
def test_why_a_file_holds_no_samples(text: str, words: str) -> None:
    with pytest.raises(Unreadable, match=words):
        traces.read_gpus(text)


def notes(*rows: str, header: str = "time,index,utilization,power,memory_used") -> tuple[str, ...]:
    return traces.read_gpus("\n".join([header, *rows]) + "\n").notes


def rows_of(gpu: int, times: range, power: str = "500", memory: str = "70000") -> list[str]:
    return [f"{at},{gpu},98,{power},{memory}" for at in times]


def test_what_is_odd_in_a_file_is_a_note() -> None:
    lacking = len(notes(*rows_of(0, range(3))))
    odd = notes(*rows_of(0, range(30)), *rows_of(1, range(30), power="ERR!"))
    assert odd[0] == "column power: 30 of 60 cells are no possible figure, as 'ERR!'"
    lost = notes(*rows_of(0, range(60)), *rows_of(1, range(20)), *rows_of(1, range(40, 60)))
    assert lost[0] == "GPU 1 has no samples from 19 s to 40 s, others have: was it lost?"
    gone = notes(
        *rows_of(0, range(60)), *rows_of(1, range(30)), *(f"{at},1{',[GPU is lost]' * 3}" for at in range(30, 60))
    )
    assert gone[:2] == (
        "30 of 120 rows say nothing and are left out, as '30, 1, [GPU is lost], [GPU is lost], [GPU is lost]'",
        "GPU 1 has no samples from 29 s to 59 s, others have: was it lost?",
    )
    assert len(gone) == 2 + lacking, "not for each column as well"
    assert notes(*rows_of(0, range(9)), *rows_of(2, range(9)))[0] == "no samples of GPU 1, though there are of 0 and 2"
    ended = notes(*rows_of(0, range(30)), *rows_of(0, range(30, 60), memory="4"))
    assert ended[0] == "the memory of all GPUs was freed 29 s after the first sample: the server ended there"
    twice = notes("1,0,98,693,10", header="time,index,utilization,power.draw [W],power.draw [W]")
    assert twice[0] == "column power.draw [W] is there 2 times: the first one counts"
    assert len(notes(*rows_of(0, range(60)), *rows_of(1, range(60)))) == lacking, "nothing is odd here"


def test_a_gpu_of_any_name_is_a_gpu() -> None:
    assert traces.read_gpus("time,gpu,util\n0,\u00b2,98\n").samples[0].gpu == "\u00b2"


def test_figures_with_thousands_and_the_power_of_a_dead_sensor() -> None:
    assert one("time,util,sm_clock", '0,98,"1,545 MHz"').sm_clock == 1545
    assert one("time,util,power", "0,98,0.00").power is None, "no GPU that works draws nothing"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"output_throughput": 1' + "0" * 400 + "}", '{"completed": -1}'])
def test_what_no_benchmark_writes_is_refused(text: str) -> None:
    with pytest.raises(Unreadable):
        traces.read_bench(text)


@pytest.mark.parametrize(
    "text", ["", "\n", "hello\n", "a,b\n1,2\n", "time,util\n", "time,util\n1,[N/A]\n", "1,2,3\n4,5,6\n"]
)
def test_what_holds_no_samples_says_what_is_missing(text: str) -> None:
    with pytest.raises(Unreadable):
        traces.read_gpus(text)


def test_the_benchmarks_of_sglang_and_ours() -> None:
    sglang = (
        '{"request_rate": Infinity, "max_concurrency": 64, "concurrency": 61.2, "completed": 256,'
        ' "output_throughput": 225.0, "median_itl_ms": NaN, "median_ttft_ms": 900, "server_info": {"x": [1]}}'
    )
    ours = (
        '{"max_concurrency": 64, "concurrency": 64, "output_throughput": 230.0, "phase": "run c=64 1/3",'
        ' "started": 10.5, "ended": 40}'
    )
    said = traces.read_bench(f"{sglang}\nnot JSON\n{ours}\n")
    first, second = said.runs
    assert said.notes == ("1 of 3 lines are no results and are left out",)
    assert first == Bench(output_tok_s=225, concurrency=64, completed=256, ttft=900)
    assert (second.phase, second.started, second.ended) == ("run c=64 1/3", 10.5, 40)
    assert traces.read_bench(f"[{sglang}, {ours}]").runs == (first, second)
    assert traces.read_bench("").runs == ()
    with pytest.raises(Unreadable):
        traces.read_bench("no\n")


def test_the_servers_counters_by_our_names_and_by_sglangs() -> None:
    (ours,) = traces.read_server("time,phase,running,token_usage\n1.5,run,41,0.98\n").server
    (theirs,) = traces.read_server("timestamp,phase,num_running_reqs,token_usage\n1.5,run,41,0.98\n").server
    assert ours == theirs == traces.ServerSample(1.5, "run", running=41, token_usage=0.98)
    with pytest.raises(Unreadable):
        traces.read_server("time,phase\n1,run\n")
