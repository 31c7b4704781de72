#!/bin/bash
# A swap as a careful person does it by hand: by_hand.sh NEW_UNIT [restart]
# Everything that can be prepared is prepared first; then stop, see that nothing is left, start, wait for health. With
# `restart` nothing is looked at: no swap by hand can be faster.
set -euo pipefail
unit=sglang-hand.service
main=$(systemctl show --property=MainPID --value "$unit")
cp "$1" "/etc/systemd/system/$unit"
systemctl daemon-reload
if [ "${2-}" = restart ]; then
  systemctl restart "$unit"
else
  systemctl stop "$unit"
  sleep 2 # for the driver to give memory back: the least of a dozen public scripts for SGLang, which wait 2 to 10 s
  while [ -e "/proc/$main" ] || pgrep '^sglang' >/dev/null || ss -Hltn 'sport = :30000' | grep -q .; do sleep 1; done
  systemctl start "$unit"
fi
until curl --fail --silent --max-time 30 --output /dev/null http://127.0.0.1:30000/health; do sleep 0.5; done
