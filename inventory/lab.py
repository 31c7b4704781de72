"""The hosts of the lab that runs now (`make lab`), reached as a fleet is: by a user who has sudo, host keys checked.

KERNELSWAP_LAB is the lab's folder (.lab), KERNELSWAP_LAB_USER=root logs in as root instead. KERNELSWAP_LAB_ROUTER=gpu3
makes that host the router of the others.
"""

import os
from pathlib import Path

from pyinfra.api.exceptions import InventoryError

_lab = Path(os.environ.get("KERNELSWAP_LAB") or Path(__file__).resolve().parent.parent / ".lab").resolve()
_user = os.environ.get("KERNELSWAP_LAB_USER", "ops")

try:
    _lines = (_lab / "hosts").read_text().splitlines()
except FileNotFoundError:
    raise InventoryError("no lab is running; make lab") from None

_login = {
    "ssh_user": _user,
    "ssh_key": str(_lab / "key"),
    "ssh_known_hosts_file": str(_lab / "known_hosts"),
    "ssh_strict_host_key_checking": "yes",
    "ssh_config_file": str(_lab / "ssh_config"),  # not the user's own
}
_sudo = {} if _user == "root" else {"_sudo": True, "_sudo_password": "ops"}

_hosts = dict(map(str.split, _lines))
_router = os.environ.get("KERNELSWAP_LAB_ROUTER", "")

gpu = (
    [(name, {"ssh_hostname": address}) for name, address in _hosts.items() if name != _router],
    {"model": "tiny", "profile": "torch-native", **_login, **_sudo},
)
if _router:
    gpu[1]["routers"] = [f"http://{_hosts[_router]}:30000"]
    routers = ([(_router, {"ssh_hostname": _hosts[_router]})], {"router": {}, **_login, **_sudo})
