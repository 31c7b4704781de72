python3 -m sglang.launch_server --model-path /srv/models/a --tp 16 --dist-init-addr 10.0.0.1:5000 --nnodes 2 --node-rank 0 --host 0.0.0.0
