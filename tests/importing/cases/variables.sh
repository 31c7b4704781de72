#!/bin/bash
set -euo pipefail
# Serves the coder model on both cards.
MODEL_DIR=/data/models
MODEL="$MODEL_DIR/Qwen3-Coder-30B"
PORT="${PORT:-30001}"
TP=${TP:-2}
export CUDA_VISIBLE_DEVICES=4,5
export NCCL_P2P_LEVEL=SYS
export LD_LIBRARY_PATH=/opt/cuda/lib64:$LD_LIBRARY_PATH
export PATH=/opt/cuda/bin:$PATH
export MODEL

echo "starting on $PORT"
exec /opt/venvs/sglang/bin/python3 -m sglang.launch_server \
  --model-path "$MODEL" \
  --served-model-name "$(basename "$MODEL")" \
  --tensor-parallel-size "$TP" \
  --host 0.0.0.0 --port "$PORT"
