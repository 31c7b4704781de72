python -m sglang.launch_server --model-path <path to the model> --tp 8 --host <HOST_IP> --port 30000
