python -m sglang.launch_server \
  --model-path /srv/models/a \ 
  --tp 4 \
  --host 0.0.0.0
