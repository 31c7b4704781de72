#!/bin/bash
PORT=30000
cat > /etc/systemd/system/sglang.service <<EOF
[Unit]
Description=SGLang
[Service]
ExecStart=/opt/sglang/bin/python -m sglang.launch_server --model-path /srv/models/a --port $PORT
[Install]
WantedBy=multi-user.target
EOF
systemctl daemon-reload
