docker exec -d sglang_box python3 -m sglang.launch_server --model-path /models/a --host 0.0.0.0
