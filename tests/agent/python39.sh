#!/bin/bash
# The agent's tests under Python 3.9, the oldest that a host may have: Debian 11's, in a root of its own. Run as root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=${KERNELSWAP_LAB_CACHE:-/var/cache/kernelswap}
cache=$root/python39-$(sha256sum tests/agent/python39.sh | head -c 12)

if ! [ -d "$cache" ]; then
  command -v mmdebstrap >/dev/null || apt-get install --yes --quiet mmdebstrap
  rm -rf "$root"/python39*
  mkdir -p "$root"
  mmdebstrap --quiet --variant=minbase --include=python3,procps bullseye "$cache.new"
  .venv/bin/pip install --quiet --target "$cache.new/opt/site" --python-version 3.9 --only-binary :all: \
    'pytest<8.5' 'iniconfig<2.2' 'pytest-xdist<3.9' 'execnet<2.2' exceptiongroup tomli typing-extensions nvidia-ml-py
  mv "$cache.new" "$cache"
fi
exec unshare --mount --pid --fork bash -euc '
  mount --bind "$PWD" "$1/mnt"; mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"
  exec chroot "$1" env -C /mnt PYTHONPATH=/mnt:/opt/site PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -q -n 2 -p no:cacheprovider -m "not exhaustive" \
    -o markers=exhaustive --rootdir=tests/agent --config-file=/dev/null tests/agent tests/test_protocol.py tests/test_ledger.py tests/test_verdict.py' chroot "$cache"
