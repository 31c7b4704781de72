#!/bin/bash
# Flags that are given where a variable says so; the text tells what holds when nothing is set outside of it.
MODE=latency
ARGS=(--model-path /srv/models/a --host 0.0.0.0 --enable-metrics)
if [[ "${DISABLE_RADIX_CACHE:-0}" == "1" ]]; then
  ARGS+=(--disable-radix-cache)
fi
if [ "$MODE" = "throughput" ]; then
  ARGS+=(--max-running-requests 512)
elif [ "$MODE" = "latency" ] && [ -z "${BIG:-}" ]; then
  ARGS+=(--max-running-requests 16)
else
  ARGS+=(--max-running-requests 64)
fi
[ -n "${DRAFT:-}" ] && ARGS+=(--speculative-draft-model-path "$DRAFT")
[[ "$MODE" != "latency" ]] || ARGS+=(--stream-interval 1)
if ! [ "$MODE" = "debug" ]; then ARGS+=(--log-level warning); else ARGS+=(--log-level debug); fi
python3 -m sglang.launch_server "${ARGS[@]}" "$@"
