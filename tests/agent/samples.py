"""Values that several tests start from."""

from __future__ import annotations

from kernelswap.protocol import Plan


def plan(*gpus: str) -> Plan:
    """Of an instance `main` on port 30000 with these GPUs."""
    return Plan(
        instance="main", release="r", profile="p", model="m", python="/p", argv=(), environment={}, user="u",
        model_path="/m", served_name="m", address="0.0.0.0", port=30000, gpus=gpus,
    )  # fmt: skip
