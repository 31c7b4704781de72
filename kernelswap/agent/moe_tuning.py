"""Whether the host has the tuning file that SGLang's Triton kernel for MoE layers will look for. It serves without one,
with settings that no one measured; what that costs differs, from nothing to a fifth, so this is told, never judged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Tuple

NEAREST = 3
TUNER = "benchmark/kernels/fused_moe_triton of SGLang makes one"
FIELD = re.compile(r"(E|N|device_name|dtype|block_shape|per_channel_quant)=(\[[^]]*\]|[^,]*)(?:,|$)")

NAME = re.compile(r"E=[1-9]\d*,N=[1-9]\d*,.*(?<!_down)\.json")  # a folder of the user's own may hold others


@dataclass(frozen=True)
class Sought:
    """What the kernel looks for, from moe_probe.py: file names, the likelier first, in `folder`/triton_VERSION."""

    names: Tuple[str, ...] = ()
    folder: str = ""
    triton: str = ""


def notes(sought: Sought) -> List[str]:
    """What becomes of the search on this host, in one line; none where the kernel does not run."""
    if not sought.names:
        return []
    try:
        found = installed(Path(sought.folder))
    except OSError as error:
        return [f"MoE tuning files: {sought.folder}: {error.strerror}"]
    newest = sorted(found, key=_numbers, reverse=True)
    for name in sought.names:
        for version in [sought.triton, *newest]:
            if name in found.get(version, []):
                of = "" if version == sought.triton else f", tuned with Triton {version} for want of {sought.triton}"
                return [f"MoE layers: the Triton kernel uses {name}{of}"]
    wanted = " or ".join(sought.names)
    near = nearest(sought.names[0], sorted({name for names in found.values() for name in names}))
    shown = "; ".join(f"{name} ({why})" for name, why in near)
    line = f"MoE layers: no tuning file {wanted}, so the Triton kernel runs with its defaults"
    return [f"{line}; nearest: {shown}; {TUNER}" if near else f"{line}; {TUNER}"]


def installed(folder: Path) -> Dict[str, List[str]]:
    """The files of each Triton version."""
    return {
        version.name[len("triton_") :].replace("_", "."): [file.name for file in version.glob("E=*.json")]
        for version in folder.iterdir()
        if version.name.startswith("triton_")
    }


def nearest(wanted: str, names: List[str]) -> List[Tuple[str, str]]:
    """The files that differ least, each with why it does not fit; this GPU's first among equals."""
    asked = fields(wanted)
    others = [(name, given) for name in names if NAME.fullmatch(name) and (given := fields(name)) != asked]
    others.sort(key=lambda other: (_distance(asked, other[1]), other[0]))
    return [(name, ", ".join(_why(asked, given))) for name, given in others[:NEAREST]]


def fields(name: str) -> Dict[str, str]:
    return {match[1]: match[2] for match in FIELD.finditer(name[: -len(".json")])}


def _distance(asked: Dict[str, str], given: Dict[str, str]) -> Tuple[int, bool, int]:
    differs = [key for key in {*asked, *given} if asked.get(key) != given.get(key)]
    steps = sum(abs(int(asked.get(key, 0)) - int(given.get(key, 0))) for key in ("E", "N"))
    return len(differs), "device_name" in differs, steps


def _why(asked: Dict[str, str], given: Dict[str, str]) -> List[str]:
    why = []
    if given.get("E") != asked.get("E"):
        why.append(f"for {given.get('E')} experts a rank: another model, or other expert parallelism")
    if given.get("N") != asked.get("N"):
        why.append(f"for {given.get('N')} of intermediate size a rank: {_other_size(asked, given)}")
    if given.get("device_name") != asked.get("device_name"):
        why.append(f"for another GPU ({given.get('device_name', '').replace('_', ' ')})")
    options = ("dtype", "block_shape", "per_channel_quant")
    why += [f"for {key} {given.get(key, 'none')}" for key in options if given.get(key) != asked.get(key)]
    return why


def _other_size(asked: Dict[str, str], given: Dict[str, str]) -> str:
    """With the same experts and twice or half the size it is the same model, most likely, on other ranks."""
    small, large = sorted((int(asked["N"]), int(given["N"])))
    same = asked.get("E") == given.get("E") and large % small == 0 and bin(large // small).count("1") == 1
    return "other tensor parallelism" if same else "another model"


def _numbers(version: str) -> List[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
