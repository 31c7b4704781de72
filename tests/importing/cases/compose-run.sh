docker compose run --rm -p 30000:30000 sglang python3 -m sglang.launch_server --model-path /models/a --host 0.0.0.0
