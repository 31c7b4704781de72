#!/bin/bash
# One server; its flags come from a function and from words that quotes hold together.
NAME='the "big" one' SIZE=b\ g
common() { FLAGS+=("--served-model-name=$NAME" --context-length "$1"); }
FLAGS=(--trust-remote-code)
common 4096
BATCHES="1 2 4"
python3 -m sglang.launch_server --model-path "/srv/models/my model" "${FLAGS[@]}" --cuda-graph-bs-decode $BATCHES \
  --tool-call-parser 'qwen'"25" --host 0.0.0.0 --reasoning-parser $'qw\x65n3' \
  --json-model-override-args "{\"size\": \"$SIZE\", \"cost\": \"5\$\"}" --log-level w"arn"ing
