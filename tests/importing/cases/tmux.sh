tmux new-session -d -s llm "cd /srv && CUDA_VISIBLE_DEVICES=0,1,2,3 python3 -m sglang.launch_server --model-path models/kimi-k2 --tp 4 --host 0.0.0.0 2>&1 | tee /tmp/kimi.log"
