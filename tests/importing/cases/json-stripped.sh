python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0 \
  --json-model-override-args {"num_hidden_layers": 4} \
  --model-loader-extra-config "{"enable_multithread_load": true}"
