vllm serve /srv/models/a --tensor-parallel-size 2
