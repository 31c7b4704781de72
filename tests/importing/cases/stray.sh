python3 -m sglang.launch_server --model-path /srv/models/my model --tp --host 0.0.0.0
