docker run -d --name sgl --gpus '"device=2,3"' -p 8080:30000 -v /data/hf:/models:ro --shm-size 32g --restart unless-stopped \
  -e HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789 -e SGLANG_ENABLE_JIT_DEEPGEMM=0 lmsysorg/sglang:v0.5.20-cu129 \
  bash -c 'pip install -q nixl && exec python3 -m sglang.launch_server --model-path /models/Qwen3-32B --tp 2 --host 0.0.0.0 --port 30000 --chat-template /models/Qwen3-32B/t.jinja'
