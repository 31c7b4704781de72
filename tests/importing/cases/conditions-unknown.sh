#!/bin/bash
# Two ways, and nothing here tells which.
if [ "$DP" = "true" ]; then
  SIZE=16384
else
  SIZE=8192
fi
[ -f /etc/sglang/draft ] && EXTRA="--enable-mixed-chunk"
read -r PORT < /etc/sglang/port
python3 -m sglang.launch_server --model-path /srv/models/a --port "$PORT" --chunked-prefill-size "$SIZE" $EXTRA
