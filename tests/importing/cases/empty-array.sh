SPEC=()
BATCHES=(1 2 4)
python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 \
  --cuda-graph-bs-decode "${BATCHES[@]}" "${SPEC[@]}" --served-model-name "${NAME:-}a" --enable-metrics "${SPEC[@]}"
