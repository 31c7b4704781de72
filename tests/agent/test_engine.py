"""The programs that are given to the engine's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernelswap.agent import engine


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["bench_serving.py"], "sglang.bench_serving"),
        (["bench_serving.py", "benchmark/__init__.py"], "sglang.bench_serving"),
        (["bench_serving.py", "benchmark/__init__.py", "benchmark/serving.py"], "sglang.benchmark.serving"),
    ],
)
def test_the_benchmark_is_found_where_each_sglang_keeps_it(tmp_path: Path, files: list[str], found: str) -> None:
    for name in ["__init__.py", *files]:
        file = tmp_path / "sglang" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("import sys\nprint(sys.argv)\n" if "serving" in name else "")
    words = [sys.executable, "-c", engine.BENCH, "--port", "1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert f"/{found.replace('.', '/')}.py', '--port', '1']" in done.stdout, done.stderr
