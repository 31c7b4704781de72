python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --json-model-override-args '{
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "max_position_embeddings": 131072
  }' --log-level error
