python3 -m sglang.launch_server --model-path /srv/models/a --disaggregation-mode prefill --disaggregation-ib-device mlx5_0 --host 0.0.0.0
