for role in prefill decode; do
  CUDA_VISIBLE_DEVICES=$gpu python3 -m sglang.launch_server --model-path /srv/models/a --disaggregation-mode "$role" --host 0.0.0.0 &
done
