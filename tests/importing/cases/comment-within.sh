python -m sglang.launch_server \
  --model-path /srv/models/a \
  # --enable-torch-compile \
  --tp 4 \
  --host 0.0.0.0
