#!/bin/bash
# Makes what the lab's hosts boot from, once, and prints its layers (top first, as overlayfs wants them):
#   base     Debian, its users, sshd, a persistent journal
#   engine   /opt/sglang: SGLang in a venv of Debian's own Python
#   model    /srv/models/tiny and the shim that lets SGLang run without CUDA packages
#   router   /opt/sglang-router: sglang-router in a venv of its own
#   nvml     the simulated libnvidia-ml.so.1
#   standin  /opt/standin: what stands in for SGLang where its load time is not the point; /opt/faulty: what breaks the real one
# Each layer is named by a digest of what it is made from, so a changed input remakes it and what stands on it, and nothing else.
#   build.sh            make what is missing, print the layers
#   build.sh clean      remove what this checkout does not use and no host has mounted
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/common.sh"
suite=bookworm
packages=systemd,systemd-sysv,dbus,openssh-server,sudo,python3,python3-venv,iproute2,procps,curl

digest() { sha256sum | cut -c1-12; }

name_layers() {
  base=$cache/base-$({ echo "$suite $packages"; declare -f make_base; } | digest)
  wheels=$cache/wheels-$({ cat "$here/requirements.txt"; declare -f download; } | digest)
  engine=$cache/engine-$({ echo "$base $wheels"; declare -f make_engine; } | digest)
  model=$cache/model-$({ echo "$engine"; cat "$here/make_model.py" "$here/shim/sitecustomize.py"; declare -f make_model; } | digest)
  router_wheels=$cache/router-wheels-$({ cat "$here/router/requirements.txt"; declare -f download download_router; } | digest)
  router=$cache/router-$({ echo "$base $router_wheels"; declare -f make_router; } | digest)
  nvml=$cache/nvml-$({ echo "$base"; cat "$here/nvml/nvml.c"; declare -f make_nvml; } | digest)
  standin=$cache/standin-$({ cat "$here"/standin/sglang/{,srt/}*.py "$here"/faulty/*.py; declare -f make_standin; } | digest)
}

# Masked: what has nothing to do here, then what would reach into the kernel that the hosts share with this machine. Removed: the
# offer to start logind, without which `reboot` falls back to asking systemd.
make_base() {
  mmdebstrap --quiet --variant=minbase --mode=root --include="$packages" \
    --customize-hook='chroot "$1" useradd -m -s /bin/bash -G sudo ops; echo ops:ops | chroot "$1" chpasswd' \
    --customize-hook='chroot "$1" systemctl --quiet mask getty.target console-getty.service systemd-networkd.service \
      systemd-logind.service systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service e2scrub_all.timer' \
    --customize-hook='chroot "$1" systemctl --quiet mask systemd-sysctl.service systemd-modules-load.service sys-kernel-debug.mount \
      sys-kernel-tracing.mount dev-hugepages.mount' \
    --customize-hook='printf "MaxStartups 200\nMaxSessions 200\n" >"$1/etc/ssh/sshd_config.d/lab.conf"' \
    --customize-hook='mkdir -p "$1/var/log/journal"' \
    --customize-hook='rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/machine-id" "$1/var/lib/dbus/machine-id"' \
    --customize-hook='rm "$1/usr/lib/systemd/system/dbus-org.freedesktop.login1.service" \
      "$1/usr/share/dbus-1/system-services/org.freedesktop.login1.service"; touch "$1/etc/default/locale"' \
    --customize-hook=': >"$1/etc/resolv.conf"' \
    "$suite" "$1" # no name server: a host of the lab reaches only the lab, and a look-up then fails at once
}

# The wheels are fetched out here, with whatever pip is set up to use, for the Python of the hosts.
download() {
  local tag args=()
  for tag in 2_34 2_28 2_27 2_26 2_24 2_17 2014 2_12 2010 1; do
    case $tag in *_*) args+=(--platform "manylinux_${tag}_x86_64") ;; *) args+=(--platform "manylinux${tag}_x86_64") ;; esac
  done
  "$(python_with_pip)" -m pip download -qq --no-deps --only-binary :all: --python-version 3.11 --implementation cp "${args[@]}" \
    --dest "$1" -r "$here/requirements.txt" || fail "cannot download the engine's wheels" "$cpu_torch"
  for tag in "$1"/torch-*.whl; do # checked before the wheels are kept: the fix is another index, not another digest
    if "$(python_with_pip)" -m zipfile -l "$tag" | grep -q libtorch_cuda; then fail "${tag##*/} is built for CUDA" "$cpu_torch"; fi
  done
}
# PyTorch's default index may hold only CUDA builds for Linux: those load libraries that the hosts do not have.
cpu_torch="the lab needs PyTorch's CPU build: let PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL point to its CPU wheels"

python_with_pip() {
  local python
  for python in "${PYTHON:-python3}" "$here/../.venv/bin/python" python3 /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then echo "$python"; return; fi
  done
  fail "no Python with pip found" "apt install python3-pip, or set PYTHON"
}

make_engine() {
  mount --bind "$wheels" "$1/mnt"
  inside "$1" python3 -m venv /opt/sglang
  inside "$1" /opt/sglang/bin/pip install -qq --no-deps --no-index --no-compile --find-links /mnt -r /dev/stdin <"$here/requirements.txt"
  inside "$1" /opt/sglang/bin/python -m compileall -qq -j 0 /opt/sglang/lib || true # some packages carry files of Python 2
  inside "$1" /opt/sglang/bin/python -c 'import torch' || fail "PyTorch does not load" "$cpu_torch"
}

make_model() {
  mkdir -p "$1/opt/sglang/shim" "$1/srv/models"
  install -m 644 "$here/shim/sitecustomize.py" "$1/opt/sglang/shim/"
  inside "$1" /opt/sglang/bin/python -m compileall -qq /opt/sglang/shim
  inside "$1" env PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 HOME=/root /opt/sglang/bin/python -W ignore - /srv/models/tiny \
    <"$here/make_model.py" >&2 || fail "the tiny model did not learn its facts" "run the build again; lab/make_model.py says how it is trained"
  chmod -R a+rX "$1/srv/models"
}

download_router() {
  ( shopt -s nullglob # there is no torch among them
    PYTHON=$(python_with_pip) here=$here/router download "$1" )
}

make_router() {
  mount --bind "$router_wheels" "$1/mnt"
  inside "$1" python3 -m venv /opt/sglang-router
  inside "$1" /opt/sglang-router/bin/pip install -qq --no-deps --no-index --find-links /mnt -r /dev/stdin <"$here/router/requirements.txt"
  inside "$1" /opt/sglang-router/bin/python -c 'import sglang_router.launch_router'
}

make_nvml() {
  local library=usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1
  mkdir -p "$1/${library%/*}"
  gcc -std=c11 -D_POSIX_C_SOURCE=200809L -O2 -Wall -Wextra -Werror -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 \
    -o "$1/$library" "$here/nvml/nvml.c"
  inside "$1" ldconfig
  inside "$1" python3 -c 'import ctypes; assert ctypes.CDLL("libnvidia-ml.so.1").nvmlInitWithFlags(0) == 0'
}

make_standin() {
  local file
  for file in __init__ launch_server bench_serving srt/__init__ srt/server_args; do
    install -D -m 644 "$here/standin/sglang/$file.py" "$1/opt/standin/sglang/$file.py"
  done
  install -D -m 644 "$here/faulty/sitecustomize.py" "$1/opt/faulty/sitecustomize.py"
}

inside() { # inside ROOT COMMAND...: run it there in a clean environment
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 chroot "$@"
}

plain() { # plain TARGET COMMAND: COMMAND fills a folder, which becomes TARGET only when whole
  if [ -d "$1" ]; then return; fi
  local start=$SECONDS
  rm -rf "$1.tmp"
  case $2 in download*) mkdir "$1.tmp" ;; esac
  "$2" "$1.tmp"
  mv "$1.tmp" "$1"
  note "made ${1##*/} in $((SECONDS - start)) s"
}

layer() { # layer TARGET LOWERS COMMAND: what COMMAND changes in a root made of LOWERS becomes TARGET
  local target=$1 work=$1.tmp start=$SECONDS
  if [ -d "$target" ]; then return; fi
  rm -rf "$work" "$target.new"
  mkdir "$work"
  if [ "$(stat -f -c %T "$cache")" = overlayfs ]; then mount -t tmpfs tmpfs "$work"; fi # an overlay cannot be written to an overlay
  mkdir "$work"/{upper,work,root}
  mount -t overlay overlay -o "lowerdir=$2,upperdir=$work/upper,workdir=$work/work" "$work/root"
  mount -t proc proc "$work/root/proc"
  mount --rbind /dev "$work/root/dev"
  "$3" "$work/root"
  umount -R "$work/root"
  if mountpoint -q "$work"; then cp -a "$work/upper" "$target.new"; umount "$work"; else mv "$work/upper" "$target.new"; fi
  mv "$target.new" "$target"
  rm -rf "$work"
  note "made ${target##*/} in $((SECONDS - start)) s"
}

build() {
  need mmdebstrap:mmdebstrap gcc:gcc,libc6-dev
  [ -f /usr/share/keyrings/debian-archive-keyring.gpg ] || install_packages debian-archive-keyring
  plain "$base" make_base
  plain "$wheels" download
  layer "$engine" "$base" make_engine
  layer "$model" "$engine:$base" make_model
  plain "$router_wheels" download_router
  layer "$router" "$base" make_router
  layer "$nvml" "$base" make_nvml
  plain "$standin" make_standin
}

clean() {
  local entry
  for entry in "$cache"/*-*; do
    case $entry in "$base" | "$wheels" | "$engine" | "$model" | "$router_wheels" | "$router" | "$nvml" | "$standin") continue ;; esac
    grep -q "[=:]$entry[:,]" /proc/self/mounts || { note "removing ${entry##*/}"; rm -rf "$entry"; }
  done
}

main() {
  need_root
  name_layers
  if [ "${1-}" = --locked ]; then
    "$2"
    return
  fi
  if [ "${1-}" = clean ]; then
    locked clean
    return
  fi
  [ -d "$base" -a -d "$engine" -a -d "$model" -a -d "$router" -a -d "$nvml" -a -d "$standin" ] || locked build
  echo "$standin:$nvml:$router:$model:$engine:$base"
}

locked() { # in a mount namespace of its own, so that an interrupted build leaves no mount; one at a time, so that none races
  need flock:util-linux unshare:util-linux
  mkdir -p "$cache"
  flock -o "$cache/lock" unshare --mount --propagation private "$BASH" "$0" --locked "$1"
}
main "$@"
exit
