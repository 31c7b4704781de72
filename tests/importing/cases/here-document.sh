cat > /usr/local/bin/serve.sh <<'EOF'
#!/bin/bash
python3 -m sglang.launch_server --model-path /srv/models/a
EOF
chmod +x /usr/local/bin/serve.sh
