python3 -m sglang.launch_server --model_path /srv/models/a --host 0.0.0.0 --reasoning_parser qwen3 --enable_metrics --mem-fraction 0.8 --tp 2 --tensor-parallel-size 4
