docker login -u bob -p hunter22 registry.example.com
huggingface-cli login --token hf_abcdefghijklmnopqrstuvwxyz012345
python -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0
