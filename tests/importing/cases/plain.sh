python -m sglang.launch_server --model-path /srv/models/Qwen3-30B-A3B --tp 2 --port 8000 --host 0.0.0.0
