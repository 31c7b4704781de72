#!/usr/bin/env bash
ARGS=(
  --model-path /srv/models/DeepSeek-R1-0528
  --trust-remote-code   # its own modelling code
  --tp 8
  --json-model-override-args '{"rope_scaling": {"factor": 4.0, "type": "yarn"}}'
)
if [ "${EAGLE:-0}" = 1 ]; then
  ARGS+=(--speculative-algorithm EAGLE --speculative-num-steps 3)
fi
if command -v sglang >/dev/null; then
  exec sglang serve "${ARGS[@]}" --host 0.0.0.0
else
  exec python3 -m sglang.launch_server "${ARGS[@]}" --host 0.0.0.0
fi
