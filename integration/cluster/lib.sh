# shellcheck shell=bash disable=SC2034
# Sourced by every script here: what may differ between machines and runs (set it in the environment to override it), and
# the helpers.
RECIPE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# Several clusters fit on one machine, told apart by INSTANCE (0 to 9): every path, port, address range, interface and
# cgroup name derives from it.
I=${INSTANCE:-0}
case $I in [0-9]) ;; *) echo "INSTANCE must be a digit: $I" >&2; exit 1 ;; esac
W=${SLUICE_CLUSTER_ROOT:-/tmp}/sluice-cluster-$I  # all state; short, since unix socket paths end at 107 bytes
CLUSTER=sluice$I                                  # names the bridge, veths and cgroups; at most 8 letters
NODE=node1
KUBECONFIG=$W/admin.kubeconfig

# What is built once stays outside the repository, under a name that changes with the recipe.
CACHE=${SLUICE_CLUSTER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice-cluster}
recipe_hash() {
  { go env GOVERSION GOARCH 2>/dev/null; cat "$RECIPE"/build.sh "$RECIPE"/build/{,runtime/}go.{mod,sum} "$RECIPE"/build/*/main.go; } |
    sha256sum | cut -c1-16
}
BIN=${SLUICE_CLUSTER_BIN:-$CACHE/$(recipe_hash)}

# Others can be named. Debian's are older: CONTAINERD_BIN=/usr/bin/containerd CTR_BIN=/usr/bin/ctr (without CNI 1.1.0).
CONTAINERD_BIN=${CONTAINERD_BIN:-$BIN/containerd}  # its shim is beside it
CTR_BIN=${CTR_BIN:-$BIN/ctr}
CNI_PLUGINS=${CNI_PLUGINS:-$BIN/cni}
# Debian's packages (see `make setup-cluster`)
BUSYBOX=${BUSYBOX:-/bin/busybox}

# The wire between API server and node: a bridge in the machine's own network namespace, the node on a veth of it.
NET=10.$((100 + I)).0            # /24; .1 is the machine, .11 the node
NODE_IP=$NET.11
POD_CIDR=10.$((200 + I)).0.0/16  # the controller manager gives the node a /24 of it
SVC_CIDR=10.$((150 + I)).0.0/16
SVC_FIRST=10.$((150 + I)).0.1    # the service `kubernetes`: always the first address
DNS_IP=10.$((150 + I)).0.10      # written into pods' resolv.conf; nobody answers there, tests use addresses
# Ports of our own: were another etcd on the usual port, ours would fail to start and our API server would quietly live in
# the other one.
API_PORT=$((16443 + I)) ETCD_PORT=$((12379 + 2 * I)) ETCD_PEER_PORT=$((12380 + 2 * I))
KCM_PORT=$((11257 + I)) SCHED_PORT=$((11357 + I))
API=https://$NET.1:$API_PORT

PAUSE_IMAGE=localhost/pause:test
BOX_IMAGE=localhost/box:test
ZTUNNEL_IMAGE=localhost/standin-ztunnel:test
SLUICE_IMAGE=localhost/sluice:dev

for v in RECIPE BIN W; do # they end up in mount options, YAML, TOML and sed
  case ${!v} in *[!A-Za-z0-9/_.-]*) echo "$v may have letters, digits and /_.- only: ${!v}" >&2; exit 1 ;; esac
done
# The node has overlays over these: the state itself may not lie under one of them.
case $W in /etc/* | /opt/* | /var/* | /run/*) echo "SLUICE_CLUSTER_ROOT may not be under /etc, /opt, /var or /run: $W" >&2; exit 1 ;; esac

log() { printf '%s %s\n' "$(date +%T.%3N)" "$*" >&2; }
die() { log "FATAL: $*"; exit 1; }
kc() { "$BIN/kubectl" --kubeconfig "$KUBECONFIG" --request-timeout=20s "$@"; }

# A pid file holds a process id and its start time (field 22 of /proc/PID/stat), so that an id which the kernel has given
# to another process since is never signalled.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
pid_save() { echo "$2 $(start_time "$2")" >"$1"; } # FILE PID
pid_of() {                                         # FILE; fails if the process has ended
  local pid started
  [ -r "$1" ] && read -r pid started <"$1" && [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ] && echo "$pid"
}
# FILE; a zombie counts as ended: where process 1 is no init, nobody reaps it.
alive() { local pid; pid=$(pid_of "$1") && ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2>/dev/null; }

# spawn NAME CMD...: in the background, in a session of its own, output in $W/log/NAME.log, pid file $W/pid/NAME
spawn() {
  local name=$1; shift
  mkdir -p "$W/log" "$W/pid"
  setsid "$@" >>"$W/log/$name.log" 2>&1 </dev/null 9>&- &
  pid_save "$W/pid/$name" $!
}
# stop NAME [SIGNAL [SECONDS]]: signals, waits, kills in the end
stop() {
  local file=$W/pid/$1 signal=${2:-TERM} seconds=${3:-15} i
  [ -e "$file" ] || return 0
  if alive "$file"; then
    kill -"$signal" "$(pid_of "$file")" 2>/dev/null || true
    for ((i = 0; i < seconds * 10; i++)); do alive "$file" || { rm -f "$file"; return 0; }; sleep 0.1; done
    if alive "$file"; then
      log "$1 did not end in $seconds s: KILL"
      kill -KILL "$(pid_of "$file")" 2>/dev/null || true
    fi
  fi
  rm -f "$file"
}
# wait_for SECONDS WHAT CMD...: polls CMD five times a second
wait_for() {
  local seconds=$1 what=$2 end=$((SECONDS + $1)); shift 2
  while ((SECONDS < end)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.2; done
  die "no $what after $seconds s"
}
# in_node CMD...: in the node's namespaces
in_node() { nsenter -t "$(pid_of "$W/$NODE/init.pid")" -m -n -u -p -i -- "$@"; }
