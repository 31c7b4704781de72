python -m sglang.launch_server --model-path s3://bucket/a --host 0.0.0.0 --ssl-keyfile-password hunter22 --ssl-keyfile /etc/key.pem
