"""The hosts of the lab that runs now (`make lab`), reached as a fleet is: by a user who has sudo, host keys checked.

KERNELSWAP_LAB is the lab's folder (.lab), KERNELSWAP_LAB_USER=root logs in as root instead.
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

gpu = (
    [(name, {"ssh_hostname": address}) for name, address in map(str.split, _lines)],
    {"model": "tiny", "profile": "torch-native", **_login, **_sudo},
)
