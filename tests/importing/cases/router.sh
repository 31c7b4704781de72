python -m sglang_router.launch_server --model-path /srv/models/a --dp-size 4
