"""Whether the host's GPUs are what a release needs: its `requires:`, and what its parallelism asks of them."""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Sequence, Tuple

from kernelswap.agent import gpus
from kernelswap.protocol import Gpu, HostFault, Plan, Requires

OTHERS = "choose another profile, or give the instance other GPUs by `gpus:`"


def faults(plan: Plan, present: Sequence[Gpu]) -> List[HostFault]:
    """What of the GPUs stands against the release. present: the host's."""
    usable = [gpu for gpu in gpus.assigned(present, plan.gpus) if not gpu.error]
    if not usable and plan.requires != Requires():
        what = f"the release requires {_wanted(plan.requires)}, and NVML shows no GPU for it"
        return [HostFault(what, OTHERS)]
    return [*_architecture(plan, usable), *_memory(plan, usable), *_driver(plan, usable), *_divided(plan, usable)]


def notes(plan: Plan, present: Sequence[Gpu], weights: int) -> List[str]:
    """What of the GPUs is worth knowing. weights: bytes of the model's files, 0 where that is not known."""
    usable = [gpu for gpu in gpus.assigned(present, plan.gpus) if not gpu.error]
    if not gpus.needs(plan) or not usable:
        return []
    lines = []
    kinds = _grouped(usable, lambda gpu: f"{gpu.name}, {(gpu.memory_total or 0) // 1024} GiB")
    if plan.schedulers > 1 and len(kinds) > 1:
        shown = "; ".join(f"{_named(found)}: {kind}" for kind, found in kinds.items())
        lines.append(
            f"the instance's GPUs are not alike ({shown}): every rank uses as much memory as the smallest allows"
        )
    memory = plan.schedulers * min(gpu.memory_total or 0 for gpu in usable)
    if 0 < memory < weights // gpus.MIB:
        room = f"the weights have {weights // gpus.MIB} MiB, and {plan.schedulers} GPUs have {memory} MiB"
        lines.append(f"{room}: they fit only if they are quantized or offloaded while they load")
    return lines


def architecture(gpu: Gpu) -> str:
    """As compilers name it: sm120 for capability 12.0; "" if NVML does not know."""
    return f"sm{gpu.capability.replace('.', '')}" if gpu.capability else ""


def _architecture(plan: Plan, usable: Sequence[Gpu]) -> List[HostFault]:
    wanted = plan.requires.architecture
    wrong = [gpu for gpu in usable if wanted and architecture(gpu) not in wanted]
    found = _grouped(wrong, lambda gpu: f"{architecture(gpu) or 'of unknown architecture'} ({gpu.name})")
    asked = " or ".join(wanted)
    return [
        HostFault(f"{_named(alike)} is {kind}, `requires:` asks for {asked}", OTHERS) for kind, alike in found.items()
    ]


def _memory(plan: Plan, usable: Sequence[Gpu]) -> List[HostFault]:
    wanted = plan.requires.memory
    wrong = [gpu for gpu in usable if (gpu.memory_total or 0) < wanted]
    found = _grouped(wrong, lambda gpu: f"{'unknown' if gpu.memory_total is None else gpu.memory_total} MiB")
    return [
        HostFault(f"{_named(alike)} has {size}, `requires:` asks for {wanted} MiB", OTHERS)
        for size, alike in found.items()
    ]


def _driver(plan: Plan, usable: Sequence[Gpu]) -> List[HostFault]:
    wanted = plan.requires.driver
    driver = next((gpu.driver for gpu in usable if gpu.driver), "")
    if not wanted or not usable or (driver and _numbers(driver) >= _numbers(wanted)):
        return []
    found = f"the driver is {driver}" if driver else "NVML does not tell the driver's version"
    todo = "install a newer driver, or choose another profile"
    return [HostFault(f"{found}, `requires:` asks for {wanted}", todo)]


def _divided(plan: Plan, usable: Sequence[Gpu]) -> List[HostFault]:
    """CUDA shows a process one MIG device, whatever it is given (NVIDIA's MIG guide, "CUDA device enumeration"); every
    rank of SGLang is given the same list and takes the one of its own number, so the second rank finds none."""
    parts = [gpu for gpu in usable if gpu.parent]
    if plan.schedulers < 2 or not gpus.needs(plan) or not parts or len(usable) - len(parts) >= plan.schedulers:
        return []
    what = f"{plan.schedulers} ranks cannot share MIG devices, CUDA shows each process only one"
    todo = "set tp-size, pp-size and dp-size to 1, or give the instance whole GPUs by `gpus:`"
    return [HostFault(what, todo)]


def _wanted(requires: Requires) -> str:
    asked = [" or ".join(requires.architecture), f"{requires.memory} MiB" if requires.memory else ""]
    return ", ".join(filter(None, [*asked, f"driver {requires.driver}" if requires.driver else ""]))


def _grouped(found: Sequence[Gpu], key: Callable[[Gpu], str]) -> Dict[str, List[Gpu]]:
    groups: Dict[str, List[Gpu]] = {}
    for gpu in found:
        groups.setdefault(key(gpu), []).append(gpu)
    return groups


def _named(found: Sequence[Gpu]) -> str:
    return gpus.label(found[0]) if len(found) == 1 else f"each of GPUs {', '.join(str(gpu.index) for gpu in found)}"


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
