"""Which tuning files SGLang's Triton kernel for MoE layers will look for. Runs within the engine's interpreter, where
SGLang's arguments are resolved already, and only tells: to look into the host's folders is the agent's (moe_tuning.py).

The name comes from the installed SGLang's own function, the numbers from the model's config.json as SGLang's tuner
takes them (benchmark/kernels/fused_moe_triton/common_utils.py): the experts that a rank holds, with a shared one where
that is fused (srt/layers/moe/utils.py, resolve_shared_experts_config), and its part of an expert's intermediate size.
Python 3.8.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

PLACES = (  # newest first
    "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py",
    "srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py",
)
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
SIZES = ("moe_intermediate_size", "expert_hidden_dim", "ffn_hidden_size", "intermediate_size")
# Models that may put their one shared expert among the routed ones; a quantization that spares it keeps it out.
FUSING = (
    "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "Glm4vMoeForConditionalGeneration", "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
)  # fmt: skip

Kind = Tuple[
    Optional[str], Optional[List[int]], bool
]  # the dtype in a file's name, the block, whether scaled by channel


def tuning_files(values: Dict[str, Any], device: str) -> Dict[str, Any]:
    """names: of the files, the likelier one first; folder: that of all Triton versions; triton: the one installed.
    Empty where the Triton kernel will not run. Raises anything: whoever calls goes on without an answer.

    values: SGLang's resolved arguments; device: the GPU's name.
    """
    if values.get("device") == "cpu" or values.get("enable_deterministic_inference"):
        return {}
    if values.get("moe_runner_backend", "auto") not in ("auto", "triton") or values.get("moe_a2a_backend") not in (
        None,
        "none",
    ):
        return {}
    config = json.loads((Path(values["model_path"]) / "config.json").read_text(encoding="utf-8"))
    counts = experts(config, values)
    kind = quantization(config, values)
    if not counts or not kind:
        return {}
    dtype, block, by_channel = kind
    own = own_functions(device)
    size = intermediate(config) // (values["tp_size"] // values.get("ep_size", 1) // values.get("moe_dp_size", 1))
    triton = importlib.import_module("triton")
    root = os.environ.get("SGLANG_MOE_CONFIG_DIR") or str(Path(own.__file__).parent)
    return {
        "names": [own.get_config_file_name(count, size, dtype, block, by_channel) for count in counts],
        "folder": str(Path(root) / "configs"),
        "triton": triton.__version__,
    }


def experts(config: Dict[str, Any], values: Dict[str, Any]) -> List[int]:
    """How many experts a rank may hold, the likelier number first; empty for a model without any."""
    inner = text(config)
    routed = next((inner[key] for key in EXPERTS if isinstance(inner.get(key), int) and inner[key] > 1), 0)
    if not routed:
        return []
    own = (routed + (values.get("ep_num_redundant_experts") or 0)) // values.get("ep_size", 1)
    fuses = any(name in FUSING for name in config.get("architectures") or [])
    one_shared = inner.get("n_shared_experts") == 1
    return [own + 1, own] if fuses and one_shared and not values.get("disable_shared_experts_fusion") else [own]


def intermediate(config: Dict[str, Any]) -> int:
    inner = text(config)
    return int(next(inner[key] for key in SIZES if isinstance(inner.get(key), int)))


def quantization(config: Dict[str, Any], values: Dict[str, Any]) -> Optional[Kind]:
    """What the name says of the weights; None where another kernel takes them."""
    given = config.get("quantization_config") or text(config).get("quantization_config") or {}
    method = values.get("quantization") or given.get("quant_method") or "unquant"
    block = given.get("weight_block_size")
    if method == "compressed-tensors":
        groups: List[Dict[str, Any]] = list((given.get("config_groups") or {}).values())
        group = (groups[0].get("weights") or {}) if groups else {}
        if (group.get("num_bits"), group.get("type")) != (8, "float"):
            return None
        return "fp8_w8a8", group.get("block_structure"), group.get("strategy") == "channel"
    if method == "moe_wna16":
        dtype = {4: "int4_w4a16", 8: "int8_w8a16"}.get(int(given.get("bits", 4)))
        return (dtype, None, False) if dtype else None
    kinds: Dict[str, Kind] = {
        "unquant": (None, None, False),
        "fp8": ("fp8_w8a8", block, False),
        "modelopt_fp8": ("fp8_w8a8", None, False),
        "blockwise_int8": ("int8_w8a8", block, False),
        "w8a8_fp8": ("fp8_w8a8", None, True),
        "w8a8_int8": ("int8_w8a8", None, True),
    }
    return kinds.get(method)


def text(config: Dict[str, Any]) -> Dict[str, Any]:
    """The part on the language model; what it lacks is said one level up."""
    parts = [config.get(key) for key in ("text_config", "llm_config", "language_config", "ffn_config")]
    return {**config, **{key: value for part in parts if isinstance(part, dict) for key, value in part.items()}}


def own_functions(device: str) -> Any:
    """SGLang's module, by its path: its package would import every kernel with it."""
    folder = Path(str(importlib.import_module("sglang").__file__)).parent
    path = next(folder / place for place in PLACES if (folder / place).is_file())
    spec = importlib.util.spec_from_file_location("kernelswap_moe_config", path)
    if spec is None or spec.loader is None:
        raise ImportError(str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.get_device_name = lambda *_: device  # type: ignore[attr-defined]
    return module
