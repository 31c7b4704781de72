python3 -m sglang.launch_server --model-path /srv/models/a --json-model-override-args '{"a": 1}
