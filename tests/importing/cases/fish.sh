#!/usr/bin/env fish
set -gx CUDA_VISIBLE_DEVICES 0,1
set -x NCCL_DEBUG WARN
python -m sglang.launch_server --model-path /srv/models/a --tp 2 --host 0.0.0.0
