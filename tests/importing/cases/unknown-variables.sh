python -m sglang.launch_server --model-path "$1" --tp "$TP" --port $((BASE + 1)) --host $(hostname -I) --context-length ${CTX} $EXTRA "$@"
