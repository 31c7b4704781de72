#!/bin/bash
# The lab: hosts gpu1, gpu2, ... with a real systemd as PID 1, a real sshd and an address of their own, in namespaces of this
# machine. Log in as root or as ops (whose sudo password is "ops"). Run as root.
#   lab.sh build            make what the hosts boot from (build.sh); `up` does it too
#   lab.sh up N             boot gpu1..gpuN; those that run are left alone
#   lab.sh reboot NAME ...  cut the power of these at once and boot them again, each on its own disk
#   lab.sh ssh NAME [...]   a shell, or a command, on NAME (NAME may be ops@gpu1)
#   lab.sh down             end them and leave nothing behind
#   lab.sh clean            remove what no checkout's lab uses from the cache
# KERNELSWAP_LAB (.lab in the checkout) is the lab's folder; hosts, ssh_config, known_hosts and key in it tell others how to get in.
# KERNELSWAP_LAB_CACHE (/var/cache/kernelswap) keeps what is slow to make. KERNELSWAP_LAB_DISK (4g) is a host's disk, held in memory.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lab=$(realpath -m "${KERNELSWAP_LAB:-$here/../.lab}")
. "$here/common.sh"

# All that a lab leaves in the kernel carries a name made from its folder, so `down` works even after the folder is lost.
id=$(cksum <<<"$lab" | cut -d' ' -f1)
tag=ks$(printf '%08x' "$id")
cgroup=$(findmnt -n -t cgroup2 -o TARGET 2>/dev/null | head -1 || true)
cgroup=${cgroup:+$cgroup/$tag}

up() {
  local count=$1 layers name names=()
  [[ $count =~ ^[1-9][0-9]*$ && $count -le 1000 ]] || fail "how many hosts? $0 up N"
  [ -n "$cgroup" ] || fail "no cgroup2 mount here, and systemd in the hosts needs one" \
    "mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified"
  layers=$("$here/build.sh")
  claim_network
  claim_cgroup
  [ -f "$lab/key" ] || ssh-keygen -q -t ed25519 -N '' -C "$tag" -f "$lab/key"
  # The default of 128 lets about 20 hosts come up. It stays raised: other labs may need it.
  if [ "$(</proc/sys/fs/inotify/max_user_instances)" -lt 8192 ]; then sysctl -qw fs.inotify.max_user_instances=8192; fi
  for name in $(seq -f gpu%g 1 "$count"); do
    names+=("$name")
    running "$name" && continue
    if ! [ -e "$lab/$name/made" ]; then unmake "$name"; make_host "$name" "$layers"; fi
    boot "$name"
  done
  tell
  wait_ready "${names[@]}"
  mv "$lab/hosts.new" "$lab/hosts" # only now is a lab said to be running
}

# One /22 of the range kept for tests (RFC 2544) per lab; the bridge is the claim, taken under a lock of the whole machine.
claim_network() {
  local slot number=0
  find_network
  if [ -n "$network" ]; then return; fi
  exec 8>/run/lock/kernelswap-lab
  flock 8
  for slot in $(seq "$id" $((id + 128))); do
    network=198.$((18 + slot / 64 % 2)).$((slot % 64 * 4))
    ip -4 -o addr show | grep -q " $network.1/" || break
    number=$((number + 1))
  done
  [ $number -le 128 ] || fail "128 labs run here and no address is left"
  ip link del "$tag" 2>/dev/null || true
  ip link add "$tag" type bridge
  ip addr add "$network.1/22" dev "$tag"
  ip link set "$tag" up
  exec 8>&-
}

claim_cgroup() {
  local controller
  mkdir -p "$cgroup/power" 2>/dev/null || fail "cannot make a cgroup in ${cgroup%/*}" "the lab needs it writable (in a container: --privileged)"
  for controller in $(<"$cgroup/cgroup.controllers"); do
    echo "+$controller" >"$cgroup/cgroup.subtree_control" || true # what this machine does not give, the hosts do without
  done
}

find_network() { # the lab's, if it has one
  network=$(ip -4 -o addr show dev "$tag" 2>/dev/null | sed -n 's/.* inet \([0-9.]*\)\.1\/22 .*/\1/p' || true)
}

address() { # of gpuN: the Nth after the bridge's
  local number=$((${1#gpu} + 1))
  echo "${network%.*}.$((${network##*.} + number / 256)).$((number % 256))"
}

running() { grep -qs 'populated 1' "$cgroup/$1/cgroup.events"; }

make_host() {
  local name=$1 layers=$2 ns=$tag-$1 link=${tag}v${1#gpu} root=$lab/$1/root home
  mkdir -p "$lab/$name"/{disk,root}
  ip netns add "$ns"
  ip link add "$link" type veth peer name eth0 netns "$ns"
  ip link set "$link" master "$tag" up
  ip -n "$ns" addr add "$(address "$name")/22" dev eth0
  ip -n "$ns" link set lo up
  # Mounted out here, so that the disk survives a reboot of the host.
  mount -t tmpfs -o "size=${KERNELSWAP_LAB_DISK:-4g},mode=755" tmpfs "$lab/$name/disk"
  mkdir "$lab/$name/disk"/{upper,work}
  mount -t overlay overlay -o "lowerdir=$layers,upperdir=$lab/$name/disk/upper,workdir=$lab/$name/disk/work" "$root"
  echo "$name" >"$root/etc/hostname"
  printf '%s\n' '127.0.0.1 localhost' '::1 localhost' "127.0.1.1 $name" >"$root/etc/hosts"
  tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
  ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$root/etc/ssh/ssh_host_ed25519_key"
  for home in root home/ops; do
    install -d -m 700 "$root/$home/.ssh"
    install -m 600 "$lab/key.pub" "$root/$home/.ssh/authorized_keys"
    chown -R --reference="$root/$home" "$root/$home/.ssh"
  done
  touch "$lab/$name/made"
}

unmake() { # whatever there is of a host
  local mount
  if [ -d "$cgroup/$1" ]; then end_cgroup "$cgroup/$1"; fi
  for mount in "$lab/$1/root" "$lab/$1/disk"; do
    while mountpoint -q "$mount"; do umount "$mount"; done
  done
  ip link del "${tag}v${1#gpu}" 2>/dev/null || true
  ip netns del "$tag-$1" 2>/dev/null || true
  rm -rf --one-file-system "${lab:?}/$1"
}

boot() { # the power supply lives outside the host's cgroup and the caller's session, without its locks
  ( echo $BASHPID >"$cgroup/power/cgroup.procs"
    exec setsid "$BASH" "$here/lab.sh" power "$1" 9>&- >/dev/null 2>"$lab/$1/log" </dev/null ) &
}

power() { # runs for as long as the host has power: boots it again when it reboots or is cut off
  local name=$1 base=$lab/$1 status=129
  while [ $status = 129 ] || [ $status = 137 ]; do # PID 1 ended by SIGHUP: a reboot; by SIGKILL: a power cut; by SIGINT: off
    mkdir -p "$cgroup/$name"
    rm -f "$base/came-up"
    cat /proc/sys/kernel/random/uuid >"$base/boot_id"
    ip -n "$tag-$name" link set eth0 up
    status=0
    nsenter --net="/run/netns/$tag-$name" unshare --pid --mount --uts --ipc --propagation private \
      "$BASH" -c '"$@" & wait $!' fork "$BASH" "$here/init.sh" "$base" "$cgroup/$name" || status=$?
    empty_cgroup "$cgroup/$name"
  done
}

end_cgroup() {
  local pid
  while grep -q 'populated 1' "$1/cgroup.events"; do
    if [ -e "$1/cgroup.kill" ]; then echo 1 >"$1/cgroup.kill"; else # before Linux 5.14
      for pid in $(find "$1" -name cgroup.procs -exec cat {} +); do kill -9 "$pid" 2>/dev/null || true; done
    fi
    sleep 0.02
  done
  empty_cgroup "$1"
  rmdir "$1"
}

empty_cgroup() { # the dead leave their cgroups, and the filters on these, behind
  until [ -z "$(find "$1" -mindepth 1 -type d -print -quit)" ]; do
    find "$1" -mindepth 1 -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.02
  done
}

tell() { # how to reach the hosts
  local made name
  cat >"$lab/ssh_config" <<END
Host *
  User root
  IdentityFile $lab/key
  IdentitiesOnly yes
  UserKnownHostsFile $lab/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  BatchMode yes
END
  : >"$lab/hosts.new"
  : >"$lab/known_hosts.new"
  for made in $(printf '%s\n' "$lab"/gpu*/made | sort -V); do
    name=$(basename "${made%/made}")
    echo "$name $(address "$name")" >>"$lab/hosts.new"
    echo "$name,$(address "$name") $(cut -d' ' -f1,2 "$lab/$name/root/etc/ssh/ssh_host_ed25519_key.pub")" >>"$lab/known_hosts.new"
    printf 'Host %s\n  HostName %s\n' "$name" "$(address "$name")" >>"$lab/ssh_config"
  done
  mv "$lab/known_hosts.new" "$lab/known_hosts"
  if [ -n "${SUDO_UID-}" ]; then chown "$SUDO_UID" "$lab/key"; fi # so that who called sudo can log in without it
}

wait_ready() { # for all at once
  local name pids=() pid
  for name in "$@"; do
    ready "$name" 9>&- & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || fail "a host did not come up" "see $lab/*/log, then $0 down"; done
}

ready() {
  local state='' end=$((SECONDS + 120))
  echo $BASHPID >"$cgroup/power/cgroup.procs" # so that `down` ends its ssh too, if `up` was killed
  while [ $SECONDS -lt $end ] && kill -0 $$; do # not longer than who asked
    state=$(ssh -F "$lab/ssh_config" -o ConnectTimeout=2 "$1" systemctl is-system-running --wait 2>&1) || true
    # What fails once it has come up is its user's business.
    case $state in
      running) touch "$lab/$1/came-up"; return ;;
      degraded) [ -e "$lab/$1/came-up" ] && return; fail "$1 is up but a unit failed" "$0 ssh $1 systemctl --failed" ;;
    esac
    running "$1" || [ $SECONDS -lt $((end - 115)) ] || break # it died while it came up
    sleep 0.1
  done
  fail "$1: $state"
}

reboot() {
  local name old try boots=""
  for name in "$@"; do
    [ -e "$lab/$name/made" ] || fail "no host $name in $lab"
    boots+="$lab/$name/boot_id $(<"$lab/$name/boot_id")"$'\n'
  done
  for name in "$@"; do
    if running "$name"; then
      ip -n "$tag-$name" link set eth0 down # a power cut says no goodbye
      echo 1 >"$cgroup/$name/cgroup.kill"
    else
      boot "$name"
    fi
  done
  while read -r name old; do
    for try in {1..500}; do
      if [ -z "$name" ] || [ "$(<"$name")" != "$old" ]; then continue 2; fi
      sleep 0.02
    done
    fail "a host's power supply is gone" "$0 up boots it again"
  done <<<"$boots"
  wait_ready "$@"
}

down() {
  local name
  if [ -d "$cgroup" ]; then end_cgroup "$cgroup"; fi
  for name in $({ ls "$lab"; ip netns list; ip -o link show; } | sed -En "s/^(gpu|$tag-gpu|[0-9]+: ${tag}v)([0-9]+)\b.*/gpu\2/p" | sort -u); do
    unmake "$name"
  done
  ip link del "$tag" 2>/dev/null || true
  rm -f "$lab"/{hosts,hosts.new,known_hosts,known_hosts.new,ssh_config,key,key.pub}
  rmdir "$lab"
}

one_at_a_time() { # per lab; its folder is the lock, and `down` removes it
  mkdir -p "$lab"
  exec 9<"$lab"
  flock 9
  [ "$lab" -ef /proc/self/fd/9 ] || one_at_a_time
}

usage() {
  sed -n '4,9s/^# *//p' "$0" >&2
  exit 2
}

main() {
  case ${1-}/$# in
    build/1) "$here/build.sh" >/dev/null ;;
    clean/1) "$here/build.sh" clean ;;
    reboot/1) usage ;;
    up/2 | reboot/* | down/1)
      need_root
      need ip:iproute2 findmnt:util-linux ssh-keygen:openssh-client
      one_at_a_time
      "$@"
      ;;
    power/2) "$@" ;;
    ssh/1 | */0) usage ;;
    ssh/*) exec ssh -F "$lab/ssh_config" "${@:2}" ;;
    *) usage ;;
  esac
}
main "$@"
exit # bash reads on in the file it runs, which may have changed by then
