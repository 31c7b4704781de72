SGLANG_ARGS="--tp 2 --model-loader-extra-config '{\"enable_multithread_load\": true}'"
python -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 $SGLANG_ARGS
