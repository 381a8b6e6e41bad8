#!/bin/bash
# Makes $W/pki and the kubeconfigs of the control plane, the node and the administrator; keeps what is there.
# One CA and EC keys: openssl makes one in milliseconds, an RSA key takes 200.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mkdir -p "$W/pki"; chmod 700 "$W/pki"; cd "$W/pki"

key() { [ -s "$1.key" ] || openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1.key" 2>/dev/null; }

certificate() { # FILE SUBJECT client|server [SUBJECT-ALTERNATIVE-NAMES]
  [ ! -s "$1.crt" ] || return 0
  key "$1"
  { echo "basicConstraints=critical,CA:FALSE"
    echo "keyUsage=critical,digitalSignature"
    echo "extendedKeyUsage=$3Auth"
    [ -z "${4:-}" ] || echo "subjectAltName=$4"
  } >"$1.ext"
  openssl req -new -key "$1.key" -subj "$2" |
    openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -extfile "$1.ext" -out "$1.crt" 2>/dev/null
}
kubeconfig() { # FILE CERTIFICATE
  cat >"$W/$1" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: sluice, cluster: {server: "$API", certificate-authority-data: $(base64 -w0 ca.crt)}}]
users: [{name: user, user: {client-certificate-data: $(base64 -w0 "$2.crt"), client-key-data: $(base64 -w0 "$2.key")}}]
contexts: [{name: default, context: {cluster: sluice, user: user}}]
current-context: default
YAML
  chmod 600 "$W/$1"
}

key ca
[ -s ca.crt ] || openssl req -x509 -new -key ca.key -days 3650 -subj /CN=sluice-cluster-ca -out ca.crt \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
certificate apiserver /CN=kube-apiserver server \
  "IP:127.0.0.1,IP:$NET.1,IP:$SVC_FIRST,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
certificate apiserver-kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client client
certificate admin /O=system:masters/CN=admin client
certificate controllers /CN=system:kube-controller-manager client
certificate scheduler /CN=system:kube-scheduler client
certificate kube-proxy /CN=system:kube-proxy client
certificate node "/O=system:nodes/CN=system:node:$NODE" client
certificate kubelet "/CN=$NODE" server "DNS:$NODE,IP:$NODE_IP,IP:127.0.0.1"
for name in admin controllers scheduler kube-proxy; do kubeconfig "$name.kubeconfig" "$name"; done
kubeconfig kubelet.kubeconfig node
# signs and verifies service account tokens
key sa
[ -s sa.pub ] || openssl pkey -in sa.key -pubout -out sa.pub
