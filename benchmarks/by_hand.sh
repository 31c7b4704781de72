#!/bin/bash
# A swap as a careful person does it by hand: by_hand.sh NEW_UNIT
# Everything that can be prepared is prepared first; then stop, see that nothing is left, start, wait for health.
set -euo pipefail
unit=sglang-hand.service
main=$(systemctl show --property=MainPID --value "$unit")
cp "$1" "/etc/systemd/system/$unit"
systemctl daemon-reload
systemctl stop "$unit"
while [ -e "/proc/$main" ] || pgrep '^sglang' >/dev/null || ss -Hltn 'sport = :30000' | grep -q .; do sleep 0.5; done
systemctl start "$unit"
until curl --fail --silent --max-time 30 --output /dev/null http://127.0.0.1:30000/health; do sleep 0.5; done
