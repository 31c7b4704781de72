python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --preferred-sampling-params {"temperature":0.6,"top_p":0.95}
