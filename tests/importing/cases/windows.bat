docker run --gpus all -p 30000:30000 ^
  -v /srv/models:/models ^
  lmsysorg/sglang:latest ^
  python3 -m sglang.launch_server --model-path /models/a --host 0.0.0.0
