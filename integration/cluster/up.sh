#!/bin/bash
# Brings the cluster up: programs (build.sh), images, control plane, the node; returns when the node is Ready.
#   up.sh                  everything
#   up.sh control-plane    API server, etcd, controller manager and scheduler only
#   up.sh stop-apiserver | start-apiserver            as a failure would (tests use them)
#   up.sh stop-control-plane | start-control-plane    the same for all of it
# INSTANCE=n (0 to 9) gives each of several clusters ports and paths of its own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
P=$W/pki

start_apiserver() {
  spawn kube-apiserver "$BIN/kube-apiserver" \
    --etcd-servers="http://127.0.0.1:$ETCD_PORT" \
    --bind-address=0.0.0.0 --secure-port="$API_PORT" --advertise-address="$NET.1" \
    --service-cluster-ip-range="$SVC_CIDR" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --anonymous-auth=true \
    --allow-privileged=true \
    --client-ca-file="$P/ca.crt" --tls-cert-file="$P/apiserver.crt" --tls-private-key-file="$P/apiserver.key" \
    --kubelet-certificate-authority="$P/ca.crt" --kubelet-preferred-address-types=InternalIP \
    --kubelet-client-certificate="$P/apiserver-kubelet-client.crt" --kubelet-client-key="$P/apiserver-kubelet-client.key" \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$P/sa.pub" --service-account-signing-key-file="$P/sa.key" \
    --audit-policy-file="$RECIPE/conf/audit.yaml" --audit-log-path="$W/log/audit.log" \
    --profiling=false --v="${V:-1}"
  wait_for 120 "API server (see $W/log/kube-apiserver.log)" apiserver_ready
}
apiserver_ready() {
  local program
  for program in etcd kube-apiserver; do
    alive "$W/pid/$program" || { log "$program ended: $(tail -n 1 "$W/log/$program.log")"; exit 1; }
  done
  kc get --raw /readyz
}

start_control_plane() {
  if [ -e "$W/pid/kube-apiserver" ]; then
    ! alive "$W/pid/etcd" || die "up already (down.sh ends it): $W"
    log "the last run was not taken down: doing that first"; "$RECIPE/down.sh"
  fi
  local port
  for port in $API_PORT $ETCD_PORT $ETCD_PEER_PORT $KCM_PORT $SCHED_PORT; do
    ! (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || die "port $port is taken: choose another INSTANCE"
  done
  mkdir -p "$W"; chmod 755 "$W"
  "$RECIPE/pki.sh"

  ip link show "$CLUSTER" >/dev/null 2>&1 || {
    ip link add "$CLUSTER" type bridge
    ip addr add "$NET.1/24" dev "$CLUSTER"
    ip link set "$CLUSTER" up
  }
  # Until the node takes them, pod and service addresses lead nowhere. Without these routes, what the API server sends to
  # one would leave by the machine's default route, and somebody there might answer.
  local range
  for range in "$SVC_CIDR" "$POD_CIDR"; do ip route replace unreachable "$range" metric 4000; done

  start_etcd
  start_apiserver
  log "API server ready ($(since))"
  start_controllers

  # kube-proxy's rights, as kubeadm grants them
  kc get clusterrolebinding kube-proxy >/dev/null 2>&1 ||
    kc create clusterrolebinding kube-proxy --clusterrole=system:node-proxier --user=system:kube-proxy >/dev/null
  # A pod is refused until its namespace has its default service account, some seconds after readiness.
  wait_for 60 "default service account" kc -n default get serviceaccount default
  log "control plane up ($(since))"
}

start_etcd() {
  # --unsafe-no-fsync: this state need not outlive a power cut
  spawn etcd "$BIN/etcd" --name default --data-dir "$W/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls "http://127.0.0.1:$ETCD_PORT" --advertise-client-urls "http://127.0.0.1:$ETCD_PORT" \
    --listen-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" --initial-advertise-peer-urls "http://127.0.0.1:$ETCD_PEER_PORT" \
    --initial-cluster "default=http://127.0.0.1:$ETCD_PEER_PORT"
}

start_controllers() {
  local as="$W/controllers.kubeconfig"
  # --flex-volume-plugin-dir: by default it would make folders in the machine's /usr
  spawn kube-controller-manager "$BIN/kube-controller-manager" \
    --kubeconfig="$as" --authentication-kubeconfig="$as" --authorization-kubeconfig="$as" \
    --bind-address=127.0.0.1 --secure-port="$KCM_PORT" --leader-elect=false --use-service-account-credentials=true \
    --root-ca-file="$P/ca.crt" --service-account-private-key-file="$P/sa.key" \
    --cluster-signing-cert-file="$P/ca.crt" --cluster-signing-key-file="$P/ca.key" \
    --allocate-node-cidrs=true --cluster-cidr="$POD_CIDR" --node-cidr-mask-size=24 \
    --flex-volume-plugin-dir="$W/flexvolume" --service-cluster-ip-range="$SVC_CIDR" --profiling=false --v="${V:-1}"
  as=$W/scheduler.kubeconfig
  spawn kube-scheduler "$BIN/kube-scheduler" \
    --kubeconfig="$as" --authentication-kubeconfig="$as" --authorization-kubeconfig="$as" \
    --bind-address=127.0.0.1 --secure-port="$SCHED_PORT" --leader-elect=false --profiling=false --v="${V:-1}"
}

# Ready, and said so since this start: after a restart the API server still holds the last run's word.
node_ready() {
  kc get node "$NODE" -o jsonpath='{range .status.conditions[?(@.type=="Ready")]}{.status} {.lastHeartbeatTime}{end}' |
    awk -v since="$(date -u -d "@${T0%.*}" +%FT%TZ)" '{ exit !($1 == "True" && $2 >= since) }'
}

start_node() {
  "$RECIPE/node.sh" start
  wait_for 120 "Ready node (see $W/log/kubelet.log)" node_ready
  # From here to pods and services: the first makes the API server reach webhooks, the second lets tests aim at pods.
  ip route replace "$(kc get node "$NODE" -o jsonpath='{.spec.podCIDR}')" via "$NODE_IP" dev "$CLUSTER"
  ip route replace "$SVC_CIDR" via "$NODE_IP" dev "$CLUSTER"
  log "node Ready ($(since))"
}

T0=$(date +%s.%N)
since() { awk -v a="$T0" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f s", b - a }'; }
case ${1:-all} in
  all)
    "$RECIPE/build.sh"
    "$RECIPE/images.sh"
    T0=$(date +%s.%N)
    # a control plane that was started alone gets its node
    if ! alive "$W/pid/kube-apiserver" || alive "$W/$NODE/init.pid"; then start_control_plane; fi
    start_node
    cat <<TEXT

The cluster is up.
  export KUBECONFIG=$KUBECONFIG PATH=$BIN:\$PATH
  kubectl get nodes
  $RECIPE/node.sh exec CMD...     # inside the node
  make cluster-down$([ "$I" = 0 ] || echo " INSTANCE=$I")
TEXT
    ;;
  control-plane)
    "$RECIPE/build.sh"
    T0=$(date +%s.%N)
    start_control_plane
    log "export KUBECONFIG=$KUBECONFIG PATH=$BIN:\$PATH"
    ;;
  start-apiserver) start_apiserver ;;
  stop-apiserver) stop kube-apiserver KILL ;;
  start-control-plane) start_etcd; start_apiserver; start_controllers ;;
  stop-control-plane)
    for program in kube-scheduler kube-controller-manager kube-apiserver etcd; do stop "$program" KILL; done
    ;;
  *) sed -n '2,7s/^# //p' "$0"; exit 2 ;;
esac
