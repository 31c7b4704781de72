python3 -m sglang.launch_server --model-path /srv/models/a --tp 2 --base-gpu-id 4 --gpu-id-step 2 --host 0.0.0.0
