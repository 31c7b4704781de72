#!/bin/bash
# init.sh BASE CGROUP: the first process of a host, in its namespaces, gives it a root of its own and becomes systemd.
set -euo pipefail
if [ "${3-}" = "" ]; then
  echo 0 >"$2/cgroup.procs"
  exec unshare --cgroup "$BASH" "$0" "$1" "$2" inside # only now, so that the host sees its own cgroup as the root
fi
base=$1
mount --bind "$base/root" "$base/root"
cd "$base/root"
mount -t proc proc proc
mount --bind "$base/boot_id" proc/sys/kernel/random/boot_id # the kernel's own is that of the machine
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755,nosuid tmpfs dev
for device in null zero full random urandom tty; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for fd in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${fd%:*}" "dev/${fd#*:}"; done
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/lock
mount -t tmpfs -o mode=1777 tmpfs tmp
pivot_root . mnt # not chroot: the sandboxing of units needs a real root
umount -l /mnt
mount --make-rshared / # systemd leaves this to the container manager; LoadCredential= needs it
exec env -i container=lab PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --log-target=journal --show-status=0 --unit=multi-user.target
