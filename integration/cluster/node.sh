#!/bin/bash
# The node:  node.sh start | stop | reboot | exec CMD... | {start,stop}-{kubelet,containerd} | import TAR...
#
# The node is a set of namespaces (mount, network, UTS, IPC, PID) with a process 1 that does nothing; containerd, kubelet
# and kube-proxy are started into them. So
#  - it has the standard paths (/var/lib/kubelet, /etc/cni/net.d, /opt/cni/bin, /run/netns): an unchanged DaemonSet finds
#    its hostPaths. /run is a tmpfs of its own; /etc, /opt and /var are overlays over the machine's;
#  - its rules, routes, address sets and sysctls are its own: nothing touches the machine's;
#  - ending process 1 ends every process of it, and with them go its mounts, network namespaces and interfaces.
# What is not its own: /usr, /home and /root are the machine's.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
D=$W/$NODE
# The shim that belongs to the runtime comes first.
NODE_PATH=$(dirname "$CONTAINERD_BIN"):/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CGROUP=$CLUSTER-$NODE # cgroup v1: one of this name in every hierarchy

# path in the node = folder of $D
MOUNTS="
/var/lib/kubelet     kubelet
/var/lib/containerd  containerd
/var/lib/cni         cni-state
/var/log/pods        log-pods
/var/log/containers  log-containers
/etc/cni/net.d       cni-conf
/etc/cni/unchained.d cni-unchained
/opt/cni/bin         cni-bin
"

render() {
  sed -e "s#@W@#$W#g" -e "s#@D@#$D#g" -e "s#@CGROUP@#$CGROUP#g" -e "s#@PAUSE_IMAGE@#$PAUSE_IMAGE#g" \
    -e "s#@POD_CIDR@#$POD_CIDR#g" -e "s#@DNS_IP@#$DNS_IP#g" -e "s#@SUBNET@#${SUBNET:-}#g" "$RECIPE/conf/$1"
}
cgroup_roots() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2 }' /proc/mounts | sort -u; }
only_child_of() { pgrep -P "$1" | head -n 1; }

# Like spawn, in the node. nsenter forks in order to enter a PID namespace, and passes no signal on: what is worth keeping
# is its child's id.
spawn_in_node() {
  local name=$1 outer child=""; shift
  spawn "$name" nsenter -t "$(pid_of "$D/init.pid")" -m -n -u -p -i -- \
    env -i PATH="$NODE_PATH" HOME=/root "$@"
  outer=$(pid_of "$W/pid/$name") || die "$name did not start (see $W/log/$name.log)"
  for _ in $(seq 100); do child=$(only_child_of "$outer") && [ -n "$child" ] && break; sleep 0.05; done
  [ -n "$child" ] || die "$name did not start (see $W/log/$name.log)"
  pid_save "$W/pid/$name" "$child"
}

start_containerd() {
  spawn_in_node containerd "$CONTAINERD_BIN" --config "$D/containerd.toml"
  wait_for 30 "containerd (see $W/log/containerd.log)" in_node "$CTR_BIN" version
}
start_kubelet() {
  spawn_in_node kubelet "$BIN/kubelet" --config="$D/kubelet.yaml" --kubeconfig="$W/kubelet.kubeconfig" \
    --hostname-override="$NODE" --node-ip="$NODE_IP" --root-dir=/var/lib/kubelet --v="${V:-2}"
  # Its health port: a kubelet that finds no container runtime while it starts ends, and nothing here starts it again.
  wait_for 30 "kubelet (see $W/log/kubelet.log)" kubelet_up
}
kubelet_up() {
  alive "$W/pid/kubelet" || { log "kubelet ended: $(grep -E '^[EF]' "$W/log/kubelet.log" | tail -n 1)"; exit 1; }
  in_node bash -c 'exec 3<>/dev/tcp/127.0.0.1/10248'
}
import() { local tar; for tar in "$@"; do in_node "$CTR_BIN" -n k8s.io images import "$tar" >/dev/null; done; }

mkdir_cgroups() { local root; for root in $(cgroup_roots); do mkdir -p "$root/$CGROUP" 2>/dev/null || true; done; }

start_init() {
  # It reaps orphans, which bash's wait does, and does nothing else.
  cat >"$D/init.sh" <<'INIT'
trap 'exit 0' TERM
while :; do sleep 3600 & wait $!; done
INIT
  setsid unshare --mount --net --uts --ipc --pid --fork --propagation private --mount-proc \
    bash "$D/init.sh" >"$D/init.log" 2>&1 </dev/null 9>&- &
  # unshare's child is the init; its id out here is what nsenter needs.
  local outer=$! child=""
  for _ in $(seq 100); do
    child=$(only_child_of "$outer" || true)
    [ -n "$child" ] && [ "$(tr '\0' ' ' <"/proc/$child/cmdline" 2>/dev/null)" = "bash $D/init.sh " ] && break
    child=""; sleep 0.05
  done
  [ -n "$child" ] || die "the node's process 1 did not start (see $D/init.log)"
  pid_save "$D/init.pid" "$child"
}

mount_all() {
  echo "$MOUNTS" >"$D/mounts"
  # shellcheck disable=SC2016 # the inner shell expands these
  in_node bash -euo pipefail -c '
    D=$1; hostname "$2"
    mount -t tmpfs -o mode=755 node-run /run
    mkdir -p /run/netns /run/lock /run/containerd
    # A /sys of the node: its network devices, the machine`s cgroups. This comes while the mounts are private: once they
    # are shared, a second bind of /sys/fs/cgroup is a peer of the first and unmounting one empties both. Hence --move.
    mkdir /run/.cgroup; mount --rbind /sys/fs/cgroup /run/.cgroup
    mount -t sysfs sysfs /sys
    mount --move /run/.cgroup /sys/fs/cgroup; rmdir /run/.cgroup
    # Overlays, not folders made on the machine`s own root: removing a folder there that is a mount point in another
    # node`s namespace silently unmounts it in that one.
    for o in etc opt var; do
      mkdir -p "$D/overlay/$o/upper" "$D/overlay/$o/work"
      mount -t overlay -o "lowerdir=/$o,upperdir=$D/overlay/$o/upper,workdir=$D/overlay/$o/work" "node-$o" "/$o"
    done
    # Plain folders, not overlays, for what holds overlays of its own.
    while read -r path folder; do
      [ -n "$path" ] || continue
      mkdir -p "$D/$folder" "$path"; mount --bind "$D/$folder" "$path"
    done <"$D/mounts"
    # Volumes with Bidirectional propagation need shared mounts, and without systemd none are. Peers are in this node only.
    mount --make-rshared /
    cp "$3"/* /opt/cni/bin/
    ip link set lo up
    sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0
    # present only where the bridge filter is: kube-proxy needs it for pods of one bridge
    sysctl -qw net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
  ' _ "$D" "$NODE" "$CNI_PLUGINS"
}

start_wire() {
  ip link add "$CLUSTER-$NODE" type veth peer name eth0 netns "$(pid_of "$D/init.pid")"
  ip link set "$CLUSTER-$NODE" master "$CLUSTER" up
  in_node ip addr add "$NODE_IP/24" dev eth0
  in_node ip link set eth0 up
  # Ends at the machine, which does not forward: what a pod sends outside is dropped, not refused.
  in_node ip route add default via "$NET.1"
}

# The node registers itself, then the controller manager gives it its pod range; only then can the network be configured.
subnet_known() { SUBNET=$(kc get node "$NODE" -o jsonpath='{.spec.podCIDR}') && [ -n "$SUBNET" ]; }

start() {
  ! alive "$D/init.pid" || die "the node is up"
  [ -x "$CONTAINERD_BIN" ] || die "no containerd at $CONTAINERD_BIN: up.sh builds it"
  mkdir -p "$D/static-pods"
  mkdir_cgroups
  start_init
  mount_all
  start_wire
  : >"$D/resolv.conf"
  render containerd.toml.in >"$D/containerd.toml"
  render kubelet.yaml.in >"$D/kubelet.yaml"
  render kube-proxy.yaml.in >"$D/kube-proxy.yaml"
  start_containerd
  import "$W"/images/*.tar
  start_kubelet
  wait_for 60 "pod range for $NODE (see $W/log/kubelet.log)" subnet_known
  # containerd 1.6 ignores CREATE in this folder: a file renamed in from another one is not seen, so the temporary
  # name is in the same folder. After a reboot an agent's files are still there: ours is rewritten only if it is missing.
  local conf
  for conf in "$D/cni-unchained" "$D/cni-conf"; do
    [ -e "$conf/10-podnet.conflist" ] || {
      render podnet.conflist.in >"$conf/.podnet.part"
      mv "$conf/.podnet.part" "$conf/10-podnet.conflist"
    }
  done
  spawn_in_node kube-proxy "$BIN/kube-proxy" --config="$D/kube-proxy.yaml" --hostname-override="$NODE" --v="${V:-1}"
}

stop_node() {
  stop kubelet; stop kube-proxy; stop containerd
  if alive "$D/init.pid"; then
    kill -KILL "$(pid_of "$D/init.pid")" 2>/dev/null || true
    for _ in $(seq 100); do alive "$D/init.pid" || break; sleep 0.1; done
  fi
  rm -f "$D/init.pid"
  # The kernel removes the node's network namespace, and with it the veth, some time after the last process.
  for _ in $(seq 100); do ip link show "$CLUSTER-$NODE" >/dev/null 2>&1 || break; sleep 0.1; done
  local root
  for root in $(cgroup_roots); do
    for _ in $(seq 20); do
      [ -d "$root/$CGROUP" ] || break
      find "$root/$CGROUP" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.2
    done
    [ ! -d "$root/$CGROUP" ] || log "cgroup left: $root/$CGROUP"
  done
}

case ${1:-} in
  start) start ;;
  stop) stop_node ;;
  reboot) stop_node; start ;; # disk kept, /run fresh
  exec) shift; in_node "$@" ;;
  import) shift; import "$@" ;;
  start-kubelet) start_kubelet ;;
  stop-kubelet) stop kubelet ;;
  start-containerd) start_containerd ;;
  stop-containerd) stop containerd ;;
  *) sed -n '2s/^# //p' "$0" >&2; exit 2 ;;
esac
