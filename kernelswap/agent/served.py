"""What a running server made of its command line, against what its preflight had foreseen."""

from __future__ import annotations

import json
import re
from typing import Any, List, Mapping, Optional, Sequence

from kernelswap.agent.redaction import names_secret, redact
from kernelswap.protocol import Resolved

DRAWN = ("random_seed", "nccl_port", "dist_init_addr")  # anew by each start that is given none
# What /server_info tells besides arguments (SGLang 0.5.23: utils/common.py build_server_info, Scheduler.get_init_info).
STATES = re.compile(
    r"internal_states|launch_command|status|version|frontend|kv_events|kv_event_sources|startup_time|max_total_num_tokens"
    r"|max_req_input_len|hicache_object_layout"
)


def served(info: Mapping[str, Any], release: str, secrets: Sequence[str], known: Optional[Resolved]) -> Resolved:
    """The arguments in an answer of /server_info, without secrets: those that `known` has, or all but its states."""
    values = {
        name: redact(json.dumps(value, sort_keys=True), secrets)
        for name, value in info.items()
        if (name in known.values if known else not STATES.fullmatch(name)) and not names_secret(name)
    }
    version = str(info.get("version") or (known.version if known else ""))
    return Resolved(release, version, values, served=True)


def differences(foreseen: Resolved, found: Resolved) -> List[str]:
    return [
        f"the server runs with {name} {value}, the preflight had foreseen {foreseen.values[name]}"
        for name, value in found.values.items()
        if value != foreseen.values[name] and name not in DRAWN
    ]
