from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernelswap.cli import diagnose

sys.path.insert(0, str(Path(__file__).parent.parent))
from scripted import SCRIPTS, ours


def files(folder: Path, name: str) -> list[str]:
    script = SCRIPTS[name]
    rows = script.rows()
    (folder / "gpu.csv").write_text(ours(rows))
    (folder / "bench.jsonl").write_text(script.bench())
    if script.server(rows):
        (folder / "metrics.csv").write_text(script.server(rows))
    return [str(folder / "gpu.csv"), str(folder / "bench.jsonl")]


def run(*words: str, data: str | None = None) -> Result:
    return CliRunner().invoke(diagnose.command, list(words), input=data)


def test_it_says_what_why_what_to_do_and_what_else_it_may_be(tmp_path: Path) -> None:
    result = run(*files(tmp_path, "glm5_100_at_55"))
    assert result.exit_code == 0
    assert result.output.startswith("busy-not-loaded")
    for words in ("330 of 600 W (55 %)", "225 tokens/s at 64", "no throttle", "--moe-runner-backend", "normal on some"):
        assert words in result.output


def test_json_standard_input_and_the_exit_code(tmp_path: Path) -> None:
    gpu, bench = files(tmp_path, "glm5_100_at_55")
    found = json.loads(run("-", bench, "--json", data=Path(gpu).read_text()).output)
    (first,) = found["findings"]
    assert (first["name"], first["phase"], found["notes"]) == ("busy-not-loaded", "run c=64", [])
    assert {"what": "power", "value": 330.0, "unit": "W"} in first["evidence"]
    assert first["next"] and first["alternatives"]
    result = run(*files(tmp_path, "no_power_known"))
    assert result.exit_code == 1
    assert "missing: power, power limit" not in result.output, "the limit is known from the card's name"
    assert "missing: power" in result.output
    assert "column power.draw [W] holds no value" in result.output


def test_the_servers_counters_beside_the_file_are_read(tmp_path: Path) -> None:
    gpu, bench = files(tmp_path, "kv_full")
    assert run(gpu, bench).output.startswith("memory-bound")
    counters = tmp_path / "elsewhere.csv"
    (tmp_path / "metrics.csv").rename(counters)
    assert not run(gpu, bench).output.startswith("memory-bound")
    assert run(gpu, bench, "--metrics", str(counters)).output.startswith("memory-bound")


def test_without_the_benchmark_it_says_so(tmp_path: Path) -> None:
    assert "whether tokens came, and how many, is not known" in run(files(tmp_path, "kv_full")[0]).output


def test_what_is_no_text_or_what_a_terminal_would_obey_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    path.write_bytes(bytes(range(256)) * 9)
    assert "gpu.csv: is no text" in run(str(path)).output
    path.write_text("\x1b]0;owned\x07,\x9b31m\n1,2\n")
    result = run(str(path))
    assert result.exit_code == 2
    assert "\ufffd]0;owned\ufffd, \ufffd31m" in result.output


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the file is empty; "), ("a,b\n1,2\n", "no column of a GPU's utilisation, power or clocks")],
)
def test_a_file_that_holds_nothing(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text(text)
    result = run(str(tmp_path / "gpu.csv"))
    assert result.exit_code == 2
    assert result.output.startswith(f"{tmp_path / 'gpu.csv'}: {words}")


def test_all_files_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text("")
    (tmp_path / "bench.jsonl").write_text("no")
    result = run(str(tmp_path / "gpu.csv"), str(tmp_path / "bench.jsonl"), "--metrics", str(tmp_path / "none.csv"))
    assert result.exit_code == 2
    assert [line.partition(": ")[0] for line in result.output.splitlines()] == [
        str(tmp_path / name) for name in ("gpu.csv", "bench.jsonl", "none.csv")
    ]


def test_a_file_beside_the_samples_that_is_no_ones_counters_is_a_note(tmp_path: Path) -> None:
    gpu, bench = files(tmp_path, "glm5_100_at_55")
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n")
    result = run(gpu, bench)
    assert result.exit_code == 0
    assert f"note: {tmp_path / 'metrics.csv'} is left out: none of the columns" in result.output


def test_counters_of_another_day_are_left_out(tmp_path: Path) -> None:
    gpu, _ = files(tmp_path, "glm5_100_at_55")
    rows = "".join(f"{1.8e9 - 3 * 86400 + second},64,0,0\n" for second in range(60))
    (tmp_path / "metrics.csv").write_text("time,running,gen_throughput,token_usage\n" + rows)
    result = run(gpu)
    assert result.output.startswith("busy-not-loaded")
    assert "of another day than the samples" in result.output


def test_a_cell_that_is_no_cell_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "gpu.csv").write_text("time,gpu,util\n0,0,0x" + "f" * 400 + "\n")
    result = run(str(tmp_path / "gpu.csv"))
    assert result.exit_code == 2
    assert "gpu.csv: has a cell that nothing can be made of" in result.output


def test_standard_input_can_be_one_file_only(tmp_path: Path) -> None:
    gpu, bench = files(tmp_path, "glm5_100_at_55")
    result = run("-", "-", data=Path(gpu).read_text() + Path(bench).read_text())
    assert result.exit_code == 2
    assert "-: standard input is named 2 times; name all but one as files" in result.output
