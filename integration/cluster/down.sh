#!/bin/bash
# Takes away all that up.sh made: processes, namespaces, mounts, interfaces, routes, cgroups and files (not the cache).
#   KEEP_LOGS=1   leaves $W/log
# No CNI DEL is called: with the node's namespaces goes everything that DEL would undo.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
"$RECIPE/node.sh" stop
for program in kube-scheduler kube-controller-manager kube-apiserver etcd; do stop "$program"; done
ip link del "$CLUSTER" 2>/dev/null # its routes go with it
for range in "$SVC_CIDR" "$POD_CIDR"; do ip route del unreachable "$range" metric 4000 2>/dev/null; done
if [ -d "$W" ]; then
  keep=(); [ "${KEEP_LOGS:-0}" != 1 ] || keep=(! -name log)
  # --one-file-system: should a mount be left after all, what is behind it is not ours to delete
  find "$W" -mindepth 1 -maxdepth 1 "${keep[@]}" -exec rm -rf --one-file-system {} +
  [ "${KEEP_LOGS:-0}" = 1 ] || rmdir "$W"
fi
log "down"
