python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --tool-server https://me:hf_abcdefghijklmnopqrstuvwxyz0123456789@tools.example.com/x
