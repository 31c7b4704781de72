python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --gpu-memory-utilization 0.92 --max-model-len 32768 --enable-prefix-caching
