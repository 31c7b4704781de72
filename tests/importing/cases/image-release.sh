docker run --gpus all --network host -v /data:/data lmsysorg/sglang:v0.5.10-cu130 python3 -m sglang.launch_server \
  --model-path /data/GLM-5 --tp 8 --host 0.0.0.0 --cuda-graph-max-bs 32 --nsa-prefill-backend flashmla_sparse --disable-cuda-graph
