# import --line 3
CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server --model-path /srv/models/a --port 30000 --host 0.0.0.0 &
CUDA_VISIBLE_DEVICES=1 python -m sglang.launch_server --model-path /srv/models/b --port 30001 --host 0.0.0.0 &
