python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --json-model-override-args "{\"a\": [1, 2.50], \"b\": \"x y\"}"
