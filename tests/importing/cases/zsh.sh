#!/usr/bin/env zsh
args=(--model-path /srv/models/a --tp 2)
name="my model"
python3 -m sglang.launch_server $args --served-model-name $name --host 0.0.0.0
