"""Two real servers of the lab's model, one of which can be made slower: what the gate says of them, again and again.

How often it errs is the simulation's to say (tests/agent/verify/test_gates.py); here that is seen to hold for real
runs. A forward pass takes as long as on a GPU, 20 ms: on two shared cores the tiny model's own 5 ms are as noisy as the
cores (12 % from run to run, where a GPU's runs differ by 1 or 2 %), and no gate tells 15 % from that.
"""

import json
from collections import Counter
from collections.abc import Callable

import pytest
from labhost import Host

from kernelswap import bundle

pytestmark = [pytest.mark.xdist_group("real"), pytest.mark.exhaustive]

SERVE = (
    "systemd-run -q --collect --unit=sglang-{name} -E PYTHONPATH=/opt/faulty:/opt/sglang/shim -E HF_HUB_OFFLINE=1 "
    "-E OMP_NUM_THREADS=1 -E HOME=/tmp/{name} -E LAB_SLOW=@/run/slow-{name} /opt/sglang/bin/python -m "
    "sglang.launch_server --model-path /srv/models/tiny --served-model-name tiny --device cpu --port {port} "
    "--attention-backend torch_native --sampling-backend pytorch --cuda-graph-backend-decode disabled "
    "--cuda-graph-backend-prefill disabled --disable-overlap-schedule --grammar-backend none --dtype bfloat16 "
    "--context-length 2048 --max-total-tokens 8192 --max-running-requests 8 --enable-metrics --sleep-on-idle"
)
READY = "for i in $(seq 300); do curl -s -m 5 -f http://127.0.0.1:{port}/ready && exit 0; sleep 1; done; exit 1"
JUDGE = """
import json, sys, tempfile
sys.path.insert(0, "/root/gate.pyz")
from pathlib import Path
from kernelswap.agent.server import Failed
from kernelswap.agent.verify import throughput
from kernelswap.protocol import Plan, Throughput, encode
wanted = Throughput(**json.loads(sys.argv[1]))
environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": "/opt/sglang/shim", "HF_HUB_OFFLINE": "1"}
def plan(instance, release, port):
    return Plan(instance, release, "p", "tiny", "/opt/sglang/bin/python", (), environment, "root", "/srv/models/tiny",
                "tiny", "127.0.0.1", port)
old, new = plan("old", "known-good", 30001), plan("new", "candidate", 30002)
quiet = lambda text: None
folder = Path(tempfile.mkdtemp())
known = throughput.baseline(new, wanted, throughput.Target(old, {}), "key", folder, quiet)
try:
    verdict = throughput.check(new, wanted, {}, known, "key", folder, quiet)
    found = (verdict.verdict, verdict.why)
except Failed as failure:
    found = ("fail", failure.cause.what)
print(json.dumps(found))
"""
PASS = 0.020  # seconds
WANTED = {"concurrency": 8, "input_tokens": 32, "output_tokens": 32, "requests": 64}


@pytest.fixture
def judge(host: Host) -> Callable[[str, int], Counter[str]]:
    """So many verdicts on a server whose forward passes take that many times as long."""
    host.write("/root/gate.pyz", bundle.build().content)
    host.write("/root/gate.py", JUDGE)
    host.run(f"systemctl stop 'sglang-*'; echo 1x{PASS} >/run/slow-old; echo 1x{PASS} >/run/slow-new", check=False)
    for name, port in (("old", 30001), ("new", 30002)):
        host.run(SERVE.format(name=name, port=port))
        host.run(READY.format(port=port), timeout=320)

    def judge(factor: str, count: int) -> Counter[str]:
        host.run(f"echo {factor}x{PASS} >/run/slow-new")
        said: Counter[str] = Counter()
        for number in range(count):
            verdict, why = json.loads(host.output(f"python3 /root/gate.py '{json.dumps(WANTED)}'", timeout=600))
            print(f"{factor} {number + 1}/{count} {verdict}: {why}", flush=True)
            said[verdict] += 1
        return said

    return judge


def test_the_same_is_not_rejected(judge: Callable[[str, int], Counter[str]]) -> None:
    assert judge("1", 20)["fail"] <= 1


def test_15_percent_slower_is_rejected(judge: Callable[[str, int], Counter[str]]) -> None:
    assert judge("1.15", 10)["fail"] >= 9
