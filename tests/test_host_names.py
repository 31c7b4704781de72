import pytest

from kernelswap.host_names import shortened


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["gpu1"], "gpu1"),
        (["gpu1", "gpu2", "gpu3", "gpu8"], "gpu[1-3,8]"),
        (["gpu2", "gpu1", "gpu2"], "gpu[1-2]"),
        (["gpu-08", "gpu-09", "gpu-10", "gpu-12"], "gpu-[08-10,12]"),
        ([f"gpu{n}" for n in range(1, 101)], "gpu[1-100]"),
        (["a1.x", "a2.x", "a1.y"], "a[1-2].x, a1.y"),
        (["rack1-gpu1", "rack1-gpu2", "rack2-gpu1"], "rack1-gpu[1-2], rack2-gpu1"),
        (["alpha", "beta"], "alpha, beta"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        ([], ""),
    ],
)
def test_names_of_hosts_in_short(hosts: list[str], text: str) -> None:
    assert shortened(hosts) == text
