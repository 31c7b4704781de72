"""Reads the package's knowledge, from the zipapp as from a checkout."""

from __future__ import annotations

import pkgutil
from functools import cache


@cache
def read(name: str) -> str:
    data = pkgutil.get_data("kernelswap", f"knowledge/{name}")
    if data is None:
        raise FileNotFoundError(f"kernelswap/knowledge/{name}")
    return data.decode()
