"""The GPU hosts. Replace the names; `ssh_*` and `_sudo` are pyinfra's own keys, the others are Kernelswap's."""

gpu = (
    [
        # What differs on one host goes into its instance: ("gpu-01...", {"instances": {"main": {"port": 30001}}}).
        ("gpu-01.example.net", {}),
        ("gpu-02.example.net", {}),
        # Two servers on one host:
        # ("gpu-03.example.net", {"instances": {
        #     "left": {"port": 30000, "gpus": [0, 1, 2, 3], "flags": {"tp-size": 4}},
        #     "right": {"port": 30001, "gpus": [4, 5, 6, 7], "flags": {"tp-size": 4}, "profile": "flashinfer"},
        # }}),
    ],
    {"model": "glm5", "profile": "cutlass", "ssh_user": "ops", "_sudo": True},
)
