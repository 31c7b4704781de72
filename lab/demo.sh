#!/bin/bash
# The main job on a real host of the lab: a converge that commits, a swap that crashes and is rolled back, and what is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export KERNELSWAP_LAB=$PWD/.lab-demo PATH=$PWD/.venv/bin:$PATH
trap 'lab/lab.sh down' EXIT

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run lab/lab.sh up 1
run pyinfra inventory/lab.py deploy.py --profile torch-native --reason "first adoption" -y
echo
echo "# The next backend needs a package that this host lacks, so the server really crashes while it starts."
if run pyinfra inventory/lab.py deploy.py --profile trtllm --reason "faster experts?" -y; then
  echo "the swap to trtllm was to fail, and did not" >&2
  exit 1
fi
echo "# Exit code 1: a swap that was rolled back is no success. The host serves what it served before:"
run kernelswap status inventory/lab.py
run kernelswap history gpu1 --inventory inventory/lab.py
