apptainer exec --nv --bind /data/models:/models /images/sglang.sif python3 -m sglang.launch_server --model-path /models/a --tp 2 --host 0.0.0.0
