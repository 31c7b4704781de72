export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789
export HUGGING_FACE_HUB_TOKEN=$HF_TOKEN
python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 --api-key sk-very-secret-1 --admin-api-key "$ADMIN_KEY"
