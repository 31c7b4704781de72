"""Copies of the lab's model with one fault each in the weights, as a wrong kernel or loader would make them compute.

usage: damage_model.py MODEL_DIR OUT_DIR FAULT...       makes OUT_DIR/FAULT of each (with the engine's Python)
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERT = "model.layers.0.mlp.experts.{}.{}.weight"
Weights = dict[str, torch.Tensor]


def permute_expert(weights: Weights) -> None:
    """The rows of one of its projections no longer fit those of the others."""
    name = EXPERT.format(0, "up_proj")
    weights[name] = weights[name].roll(1, dims=0).contiguous()


def exchange_experts(weights: Weights) -> None:
    """What the router sends to one of two experts reaches the other."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = EXPERT.format(0, part), EXPERT.format(1, part)
        weights[one], weights[other] = weights[other], weights[one]


def zero_router(weights: Weights) -> None:
    weights["model.layers.0.mlp.gate.weight"].zero_()


def scale_expert(weights: Weights) -> None:
    weights[EXPERT.format(0, "down_proj")].mul_(1.05)


def scale_norm(weights: Weights) -> None:
    weights["model.layers.1.input_layernorm.weight"].mul_(1.5)


def swap_rare_tokens(weights: Weights) -> None:
    rows = weights["model.embed_tokens.weight"]
    rows[[300, 301]] = rows[[301, 300]]


FAULTS = {
    "permuted-expert": permute_expert,
    "exchanged-experts": exchange_experts,
    "zero-router": zero_router,
    "scaled-expert": scale_expert,
    "scaled-norm": scale_norm,
    "swapped-rare-tokens": swap_rare_tokens,
}


def main(model: str, out: str, *faults: str) -> None:
    for fault in faults:
        shutil.copytree(model, Path(out) / fault)
        path = Path(out) / fault / "model.safetensors"
        weights = load_file(path)
        FAULTS[fault](weights)
        save_file(weights, path, metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
