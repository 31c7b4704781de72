"""What a running server made of its command line, against what its preflight had foreseen."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Dict, List

from kernelswap.protocol import Resolved

DRAWN = ("random_seed",)  # anew by each start that is given none


def resolved_of(foreseen: Resolved, info: Dict[str, Any]) -> Resolved:
    """What /server_info says of the arguments that the preflight knows; the rest of it is state, and keys in clear."""
    values = {name: json.dumps(info[name], sort_keys=True) for name in foreseen.values if name in info}
    version = str(info.get("version") or foreseen.version)
    return dataclasses.replace(foreseen, version=version, values=values, served=True)


def differences(foreseen: Resolved, served: Resolved) -> List[str]:
    return [
        f"the server runs with {name} {value}, the preflight had foreseen {foreseen.values[name]}"
        for name, value in served.values.items()
        if value != foreseen.values[name] and name not in DRAWN
    ]
