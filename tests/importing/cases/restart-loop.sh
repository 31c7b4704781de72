#!/bin/bash
ulimit -n 65536
ulimit -l unlimited
cd /opt/serving
source /opt/conda/etc/profile.d/conda.sh
conda activate sglang
pkill -9 -f sglang
sleep 5
nvidia-smi -pm 1
while true; do
  python -m sglang.launch_server --model-path ./models/glm --chat-template ./tpl.jinja --host 0.0.0.0 2>&1 | tee -a sglang.log
  echo "crashed, again in 10 s"
  sleep 10
done
