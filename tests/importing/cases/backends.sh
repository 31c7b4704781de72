. /etc/profile.d/modules.sh
module load cuda/13.0
export SGLANG_NSA_FUSE_TOPK=1 SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=/data/eplb
cd /data/eplb
exec python3 -m sglang.launch_server --model-path /root/models/Qwen3-235B-A22B-FP8 --tp 8 --dp 8 --ep-size 8 --enable-dp-attention \
  --moe-a2a-backend deepep --deepep-mode normal --moe-runner-backend deep_gem --kv-cache-dtype fp4_e2m1 --tp four \
  --attention-backend cutlass_mla --port 30000 --host 0.0.0.0
