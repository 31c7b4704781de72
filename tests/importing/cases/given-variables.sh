# import --set MODEL_DIR=/srv/models/x --set TP=2
python -m sglang.launch_server --model-path "$MODEL_DIR" --tp $TP --host 0.0.0.0 $EXTRA
