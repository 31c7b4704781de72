from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kernelswap.agent import moe_probe, moe_tuning
from kernelswap.agent.moe_tuning import Sought

MODELS = json.loads((Path(__file__).parent / "moe_models.json").read_text())

# The signature and the form of the name that SGLang 0.5.23 has; the lab's engine has the function itself.
MODULE = """
def get_config_file_name(E, N, dtype, block_shape=None, per_channel_quant=False, down_moe=False):
    parts = [f"E={E},N={N},device_name={get_device_name().replace(' ', '_')}"]
    parts += [f"dtype={dtype}"] if dtype else []
    parts += [f"block_shape={block_shape}"] if block_shape and all(block_shape) else []
    parts += ["per_channel_quant=True"] if per_channel_quant else []
    return ",".join(parts) + ".json"
"""


@pytest.fixture(params=moe_probe.PLACES)
def sglang(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its package, with the functions where some release has them."""
    path = tmp_path / "sglang" / request.param
    path.parent.mkdir(parents=True)
    path.write_text(MODULE)
    package, triton = types.ModuleType("sglang"), types.ModuleType("triton")
    package.__file__ = str(tmp_path / "sglang/__init__.py")
    triton.__version__ = "3.5.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "triton", triton)
    return path.parent / "configs"


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case["model"])
def test_what_the_kernel_will_look_for(sglang: Path, tmp_path: Path, case: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    values = {"model_path": str(tmp_path), "ep_size": 1, "moe_runner_backend": "auto", "moe_a2a_backend": "none"}
    found = moe_probe.tuning_files({**values, **case["values"]}, "NVIDIA X")
    expected = {"names": case["names"], "folder": str(sglang), "triton": "3.5.1"} if case["names"] else {}
    assert found == expected


def test_a_folder_of_the_users_own_counts(sglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "/opt/tuned")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[0]["config"]))
    assert moe_probe.tuning_files({"model_path": str(tmp_path), "tp_size": 8}, "X")["folder"] == "/opt/tuned/configs"
    assert sglang.name == "configs"


WANTED = "E=161,N=192,device_name=NVIDIA_RTX.json"


def files(folder: Path, *names: str) -> Sought:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    return Sought((WANTED, WANTED.replace("161", "160")), str(folder), "3.5.1")


def test_where_the_kernel_does_not_run_nothing_is_said() -> None:
    assert moe_tuning.notes(Sought()) == []


def test_a_file_of_the_installed_triton_comes_first(tmp_path: Path) -> None:
    sought = files(tmp_path, f"triton_3_5_1/{WANTED}", f"triton_3_6_0/{WANTED}")
    assert moe_tuning.notes(sought) == [f"MoE layers: the Triton kernel uses {WANTED}"]


def test_else_the_newest_of_another(tmp_path: Path) -> None:
    (line,) = moe_tuning.notes(files(tmp_path, f"triton_3_10_0/{WANTED}", f"triton_3_9_0/{WANTED}"))
    assert line.endswith(f"{WANTED}, tuned with Triton 3.10.0 for want of 3.5.1")


def test_else_the_nearest_are_named_with_why_they_do_not_fit(tmp_path: Path) -> None:
    names = [
        "E=257,N=256,device_name=NVIDIA_RTX.json",
        "E=161,N=384,device_name=NVIDIA_RTX.json",
        "E=161,N=200,device_name=NVIDIA_RTX,dtype=fp8_w8a8.json",
        "E=161,N=192,device_name=NVIDIA_H200.json",
        "E=161,N=192,device_name=NVIDIA_RTX_down.json",
        "E=8,N=9,device_name=AMD.json",
        "E=mine,N=192,device_name=NVIDIA_RTX.json",
        "E=161,device_name=NVIDIA_RTX.json",
        "E=161,N=0,device_name=NVIDIA_RTX.json",
    ]
    (line,) = moe_tuning.notes(files(tmp_path, *(f"triton_3_4_0/{name}" for name in names)))
    assert "no tuning file E=161,N=192,device_name=NVIDIA_RTX.json or E=160" in line
    first, second, third = line.partition("nearest: ")[2].split("; ")[:3]
    assert first == f"{names[1]} (for 384 of intermediate size a rank: other tensor parallelism)"
    assert second == f"{names[3]} (for another GPU (NVIDIA H200))"
    assert third.startswith(f"{names[2]} (for 200 of intermediate size a rank: another model, for dtype fp8_w8a8)")


def test_another_models_file_is_called_so() -> None:
    """161 experts of size 192 are GLM-4.7's on 8 ranks; a model with 256 cannot use them."""
    ((_, why),) = moe_tuning.nearest("E=257,N=192,device_name=NVIDIA_RTX.json", [WANTED])
    assert why == "for 161 experts a rank: another model, or other expert parallelism"


def test_a_release_that_keeps_no_files_is_no_fault(tmp_path: Path) -> None:
    assert moe_tuning.notes(Sought((WANTED,), str(tmp_path / "gone"), "3.5.1"))[0].endswith("No such file or directory")
