python -m sglang.launch_server --config /etc/sglang/glm5.yaml --model-path /srv/models/a
