docker run --gpus '"device=GPU-5f0c1a7e-0000-4000-8000-000000000001,GPU-5f0c1a7e-0000-4000-8000-000000000002"' --network host --memory=100g -v /data:/data \
  lmsysorg/sglang:v0.5.20 python3 -m sglang.launch_server --model-path /data/Qwen3.8-27B --tp 2 --speculative-algorithm EAGLE3 \
  --speculative-draft-model-path RadixArk/Qwen3.8-27B-Draft --disable-overlap --host 0.0.0.0 --chat-template /opt/templates/qwen.jinja
