python -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --disable-flashinfer --attention-backend triton
