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

# A router before them: name it in the group's data above, "routers": ["http://router-01.example.net:30000"], and here:
# routers = (["router-01.example.net"], {"router": {}, "ssh_user": "ops", "_sudo": True})
