PYTHON=${PYTHON:-/opt/sglang/bin/python}
MODEL=/srv/models/Nemotron-3
serve() {
  local port=$1
  HF_HUB_OFFLINE=1 FLASHINFER_DISABLE_VERSION_CHECK=1 \
  "$PYTHON" -m sglang.launch_server --model-path "$MODEL" --host 0.0.0.0 --port 30000 --quantization modelopt_fp4 --moe-runner-backend flashinfer_cutlass
}
serve 30000
