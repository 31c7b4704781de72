docker exec sgl bash -c 'pkill -9 -f sglang.launch_server; true'
sudo -n pkill -f sglang
ssh gpu2 "killall python3"
ps aux | grep sglang | awk '{print $2}' | xargs -r kill -9
micromamba activate sglang
python3 -m sglang.launch_server --model-path /srv/models/a --host 0.0.0.0
