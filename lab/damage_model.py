"""Copy a model with one fault in its weights, as a wrong kernel or loader would make it compute.

usage: damage_model.py MODEL_DIR OUT_DIR FAULT        (with the engine's Python)
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYER = "model.layers.{}.mlp"
Weights = dict[str, torch.Tensor]


def permute_expert(weights: Weights, layer: int = 0, expert: int = 0) -> None:
    """Its neurons no longer fit: the rows of one projection are shifted, those of the others are not."""
    name = f"{LAYER.format(layer)}.experts.{expert}.up_proj.weight"
    weights[name] = weights[name].roll(1, dims=0).contiguous()


def exchange_experts(weights: Weights, layer: int = 0, first: int = 0, second: int = 1) -> None:
    """The router's choices reach the wrong one of two experts."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"{LAYER.format(layer)}.experts.{expert}.{part}.weight" for expert in (first, second))
        weights[one], weights[other] = weights[other], weights[one]


def zero_router(weights: Weights, layer: int = 0) -> None:
    weights[f"{LAYER.format(layer)}.gate.weight"].zero_()


def scale_expert(weights: Weights, factor: float = 1.05) -> None:
    weights[f"{LAYER.format(0)}.experts.0.down_proj.weight"].mul_(factor)


def scale_norm(weights: Weights, factor: float = 1.5) -> None:
    weights["model.layers.1.input_layernorm.weight"].mul_(factor)


def swap_tokens(weights: Weights, first: int = 300, second: int = 301) -> None:
    rows = weights["model.embed_tokens.weight"]
    rows[[first, second]] = rows[[second, first]]


FAULTS = {
    "permuted-expert": permute_expert,
    **{f"permuted-expert-{i // 8}-{i % 8}": lambda w, i=i: permute_expert(w, i // 8, i % 8) for i in range(16)},
    "exchanged-experts": exchange_experts,
    "exchanged-experts-1-2-5": lambda w: exchange_experts(w, 1, 2, 5),
    "zero-router": zero_router,
    "zero-router-1": lambda w: zero_router(w, 1),
    "scaled-expert": scale_expert,
    "scaled-norm": scale_norm,
    "swapped-tokens": swap_tokens,
}


def main(model: str, out: str, fault: str) -> None:
    shutil.copytree(model, out)
    path = Path(out) / "model.safetensors"
    weights = load_file(path)
    FAULTS[fault](weights)
    save_file(weights, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
