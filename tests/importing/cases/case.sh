#!/bin/bash
BACKEND=sglang
case "$BACKEND" in
  vllm)
    exec vllm serve /srv/models/a --port 30000 ;;
  sglang)
    exec python3 -m sglang.launch_server --model-path /srv/models/a --port 30000 --host 0.0.0.0 ;;
esac
