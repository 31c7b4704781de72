MODEL=/srv/models/glm
EXTRA="--enable-metrics --attention-backend fa3"
CMD="python3 -m sglang.launch_server --model-path $MODEL --tp 4 $EXTRA --host 0.0.0.0"
eval "$CMD" > /var/log/sglang.log 2>&1 &
