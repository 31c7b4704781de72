source /opt/envs/sgl/bin/activate
python -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --log-level warning
