"""Profiles that are right or wrong in known ways, for the checks of flags. What is right is known by how they are made.

A way makes the flags of one profile from SGLang's schema and a die. `parsed`: SGLang's own parser says the same of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelswap.flags import OWNED, REFUSED

KNOWLEDGE = Path(__file__).parent.parent / "kernelswap" / "knowledge"
SCHEMA: dict[str, dict[str, Any]] = json.loads((KNOWLEDGE / "sglang" / "flags-0.5.23.json").read_text())["flags"]
RULES = [
    rule for name in ("backends", "conflicts") for rule in json.loads((KNOWLEDGE / f"{name}.json").read_text())["rules"]
]
IN_RULES = {name for rule in RULES for key in rule["if"] for name in key.replace(">", "|").split("|")}
LOOKED_INTO = {"cuda-graph-config"}  # SGLang's parser knows its keys
OLD_VALUES = {"glm45", "qwen25", "nsa", "compressed", "tokenspeed_mla"}
# Flags whose values mean nothing to another flag, and that SGLang does not call old.
PLAIN = {
    name: flag
    for name, flag in SCHEMA.items()
    if not flag.get("deprecated")
    and name not in {*OWNED, *REFUSED, *IN_RULES, *LOOKED_INTO}
    and not name.startswith("disaggregation")
}

Die = random.Random
Flags = dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """blamed: the flag that must be named as wrong, "" if the profile is right. warned: whether a warning is due."""

    name: str
    flags: Flags
    blamed: str = ""
    warned: bool = False
    parsed: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(f"{key}: {json.dumps(value)}\n" for key, value in {"flags": self.flags, **self.more}.items())


def some(die: Die, **wanted: Any) -> str:
    """A flag with these properties; None: without it."""
    having = [n for n, flag in PLAIN.items() if all(flag.get(key) == value for key, value in wanted.items())]
    return die.choice(sorted(having))


def whole(die: Die) -> str:
    return some(die, type="int", nargs=None, choices=None)


def real(die: Die) -> str:
    return some(die, type="float", nargs=None)


def bare(die: Die) -> str:
    return some(die, bare=True, negations=None)


def free(die: Die) -> str:
    return some(die, bare=None, type=None, choices=None, nargs=None)


def chosen(die: Die) -> tuple[str, str]:
    name = die.choice(
        sorted(n for n, flag in PLAIN.items() if flag.get("choices") and not flag.keys() & {"type", "nargs"})
    )
    return name, die.choice([value for value in PLAIN[name]["choices"] if value not in OLD_VALUES])


def right(die: Die) -> Flags:
    """A handful of flags with nothing wrong."""
    name, value = chosen(die)
    several = some(die, nargs="+", type="int")
    return {
        whole(die): die.randrange(1, 999),
        real(die): die.choice([1, 0.5, 1e-3, "2"]),
        bare(die): True,
        name: [value] if die.random() < 0.3 else value,
        several: die.choice([[1, 2, 8], 4]),
        some(die, type="json"): die.choice([{"a": [1, None]}, '{"b": 2}']),
        free(die): die.choice(["text", 5, "a b", ""]),
    }


def misspelt(die: Die, name: str) -> str:
    at = die.randrange(2, len(name) - 1)
    return name[:at] + "qz" + name[at:]


def wrong_choice(die: Die) -> Flags:
    name, value = chosen(die)
    return {name: f"{value}x"}


# name -> a way to make it. The first flag is to blame.
Way = Callable[[Die], Flags]
WRONG: dict[str, Way] = {
    "misspelt": lambda die: {misspelt(die, whole(die)): 1},
    "misspelt-bare": lambda die: {misspelt(die, bare(die)): True},
    "removed": lambda die: {
        die.choice(["nsa-prefill-backend", "nsa-decode-backend"]): "flashmla_kv",
    },
    "removed-bare": lambda die: {
        die.choice(["enable-ep-moe", "enable-flashinfer-cutlass-moe", "enable-double-sparsity", "stream-output"]): True
    },
    "of-vllm": lambda die: {die.choice(["gpu-memory-utilization", "max-model-len"]): 1},
    "ambiguous": lambda die: {die.choice(["cuda-graph-max-bs", "cuda-graph-bs", "speculative-num", "max"]): 8},
    "ambiguous-bare": lambda die: {die.choice(["enable", "disable", "enable-dp", "skip"]): True},
    "choice": wrong_choice,
    "choice-of-old": lambda die: {
        die.choice(["attention-backend", "decode-attention-backend"]): die.choice(
            ["cutlass_mla", "dual_chunk_flash_attn"]
        )
    },
    "choice-kv": lambda die: {"kv-cache-dtype": die.choice(["fp4_e2m1", "FP8_E4M3", "int8"])},
    "not-whole": lambda die: {whole(die): die.choice([1.5, 8.0, "many", "1k", ""])},
    "not-readable": lambda die: {"context-length": die.choice(["128K", "1.5Ki", "128 k", "lots"])},
    "not-real": lambda die: {real(die): die.choice(["half", "0,5", "50%", "1/2"])},
    "not-whole-in-list": lambda die: {some(die, nargs="+", type="int"): die.choice([[1, "x"], "1 2 4", [1.5]])},
    "value-of-bare": lambda die: {bare(die): die.choice(["true", 1, "false", "on", [1]])},
    "no-value": lambda die: {whole(die): True},
    "no-choice": lambda die: {chosen(die)[0]: True},
    "too-many": lambda die: {whole(die): [1, 2]},
    "too-many-choices": lambda die: {die.choice(["dtype", "schedule-policy"]): ["auto", "lpm"]},
    "json": lambda die: {some(die, type="json"): die.choice(["{a: 1}", "{'a': 1}", "yes", '{"a": 1'])},
    "json-list": lambda die: {some(die, type="json"): [1, 2]},
}

# Wrong for Kernelswap or on SGLang's second look; its parser takes them.
WRONG_LATER: dict[str, Way] = {
    "group": lambda die: {
        die.choice(["nnodes", "nnode", "nn", "node-rank", "node-r"]): 2,
    },
    "disaggregation": lambda die: {
        die.choice(["disaggregation-mode", "disaggregation-m"]): die.choice(["prefill", ["decode"]])
    },
    "rendezvous": lambda die: {die.choice(["dist-init-addr", "nccl-init-addr", "dist-init"]): "10.0.0.1:5000"},
    "tls": lambda die: {die.choice(["ssl-certfile", "ssl-cert", "ssl-keyfile", "ssl-ca-certs"]): "/x.pem"},
    "gpus": lambda die: {die.choice(["base-gpu-id", "base-gpu", "gpu-id-step"]): 2},
    "listener": lambda die: {die.choice(["grpc-port", "grpc-po", "gated-launch-port"]): 4000},
    "bare-refused": lambda die: {
        die.choice(["is-embedding", "use-ray", "language-only", "smg-grpc-mode", "encoder-only"]): True
    },
    "owned": lambda die: {
        die.choice(["port", "host", "api-key", "served-model-name", "served", "config", "model"]): "1"
    },
    "json-text": lambda die: {some(die, type="json-text"): die.choice(["{a: 1}", '{"a": 1'])},
    "sizes": lambda die: {"attn-dp-size": 3, "tp-size": 8},
    "experts": lambda die: {"moe-runner-backend": "flashinfer_cutlass", "quantization": "awq"},
    "kv-of-backend": lambda die: {"attention-backend": "trtllm_mla", "kv-cache-dtype": "fp8_e5m2"},
    "hierarchical": lambda die: {"enable-hierarchical-cache": True, "disable-radix-cache": True},
}
ARCHITECTURE: dict[str, tuple[str, Flags]] = {
    "trtllm_mla-sm90": ("sm90", {"attention-backend": "trtllm_mla"}),
    "cutedsl_mla-sm120": ("sm120", {"decode-attention-backend": "cutedsl_mla"}),
    "nvfp4_online-sm120": ("sm120", {"quantization": "nvfp4_online"}),
    "megamoe-sm120": ("sm120", {"moe-a2a-backend": "megamoe"}),
}
OTHER_RELEASE: dict[str, tuple[str, Flags, bool]] = {
    "old-flag": ("0.5.12", {"nsa-prefill-backend": "flashmla_kv", "cuda-graph-max-bs": 8}, False),
    "old-choice": ("0.5.19", {"attention-backend": "cutlass_mla"}, False),
    "old-kv": ("0.5.20", {"kv-cache-dtype": "fp4_e2m1"}, False),
    "too-new": ("0.5.12", {"dsa-prefill-backend": "flashmla_kv"}, True),
    "too-new-choice": ("0.5.6", {"moe-runner-backend": "hpc_ops"}, True),
    "ended": ("0.5.18", {"enable-expert-distribution-metrics": True}, True),
}
WARNED: dict[str, tuple[Flags, dict[str, Any], bool]] = {
    "deprecated": ({"disable-cuda-graph": True}, {}, True),
    "deprecated-too": ({"enable-dp-attention": True}, {}, True),
    "short": ({"mem-fraction": 0.8}, {}, True),
    "short-tp": ({"tp": 8}, {}, True),
    "old-value": ({"attention-backend": "nsa"}, {}, True),
    "fork-value": ({"moe-runner-backend": "b12x"}, {}, False),
    "fork-flag": ({"fp4-gemm-runner-backend": "auto"}, {}, False),
    "fork-of-known": ({"moe-runner-backend": "b12x"}, {"engine": {"version": "0.5.23"}}, False),
    "release-to-come": ({"flag-to-come": 1, "kv-cache-dtype": "fp2"}, {"engine": {"version": "0.9.1"}}, False),
    "post-release": ({"flag-to-come": True}, {"engine": {"version": "0.5.10.post1"}}, False),
    "sm120-trtllm": (
        {"moe-runner-backend": "flashinfer_trtllm", "quantization": "modelopt_fp4"},
        {"requires": {"architecture": ["sm120"]}},
        True,
    ),
    "old-variable": ({}, {"environment": {"SGLANG_NSA_FUSE_TOPK": 1}}, True),
}
RIGHT: dict[str, Way] = {
    "alias": lambda die: {die.choice(["tensor-parallel-size", "expert-parallel-size", "ep"]): 1},
    "negation": lambda die: {"no-enable-fused-qk-norm-rope": True},
    "readable": lambda die: {"context-length": die.choice(["128k", "1Ki", 4096, "1.5M"])},
    "gone-removed": lambda die: {"nsa-prefill-backend": None, "no-such-flag": False},
    "one-node": lambda die: {"nnodes": die.choice([1, "1", [1]]), "disaggregation-mode": "null", "node-rank": 0},
    "negative": lambda die: {"chunked-prefill-size": -1},
    "adapters": lambda die: {"lora-paths": die.choice([["a=/a", "/b"], [{"lora_name": "a", "lora_path": "/a"}]])},
    "sizes": lambda die: {"attn-dp-size": 4, "tp-size": 8, "ep-size": 8, "moe-runner-backend": "flashinfer_cutlass"},
    "json-file": lambda die: {"hicache-storage-backend-extra-config": die.choice(["@/etc/x.toml", {"a": 1}])},
    "many": lambda die: {"cuda-graph-bs-decode": list(range(1, 64))},
}


def profiles(count: int) -> Iterator[Profile]:
    """The same ones every time; about half are right. Every way comes first, with some that are plainly right after."""
    die = Die(4)
    made: list[Callable[[str], Profile]] = []
    for kind, way in (WRONG | WRONG_LATER).items():
        made += [lambda name, w=way, k=kind: _wrong(name, w(die), die, k in WRONG)] * 3  # type: ignore[misc]
    for architecture, given in ARCHITECTURE.values():
        more = {"requires": {"architecture": [architecture]}}
        made.append(lambda name, g=given, m=more: Profile(name, g, next(iter(g)), parsed=False, more=m))  # type: ignore[misc]
    for version, given, bad in OTHER_RELEASE.values():
        more = {"engine": {"version": version}}
        blamed = next(iter(given)) if bad else ""
        made.append(lambda name, g=given, b=blamed, m=more: Profile(name, g, b, parsed=False, more=m))  # type: ignore[misc]
    for given, more, parsed in WARNED.values():
        made.append(lambda name, g=given, m=more, p=parsed: Profile(name, g, "", warned=True, parsed=p, more=m))  # type: ignore[misc]
    for way in RIGHT.values():
        made.append(lambda name, w=way: Profile(name, right(die) | w(die)))  # type: ignore[misc]
    for index in range(count):
        name = f"p{index:03}"
        yield made[index](name) if index < len(made) else Profile(name, right(die))


def _wrong(name: str, faulty: Flags, die: Die, parsed: bool) -> Profile:
    flags = right(die)
    return Profile(
        name,
        {key: value for key, value in flags.items() if key not in faulty} | faulty,
        next(iter(faulty)),
        parsed=parsed,
    )
