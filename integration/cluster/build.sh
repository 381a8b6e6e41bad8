#!/bin/bash
# Builds the cluster's programs from Go modules into $BIN (see lib.sh), unless they are there already.
#
# $BIN is named after a hash of the recipe (module files, sources, this script, Go's version), so that a changed recipe
# builds anew and an unchanged one costs nothing. Cold: about seven minutes of two cores and 1 GB of module downloads.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ -e "$BIN/complete" ]; then log "programs: $BIN (cached)"; exit 0; fi
command -v go >/dev/null || die "no go on PATH: the cluster's programs are built from Go modules"
mkdir -p "$BIN"
# One builder at a time: two clusters may be started at once.
exec 9>"$BIN/lock"; flock 9
[ ! -e "$BIN/complete" ] || exit 0
started=$SECONDS

cd "$RECIPE/build"
export CGO_ENABLED=0 GOFLAGS="-mod=readonly -trimpath -buildvcs=false"
version() { go list -m -f '{{.Version}}' "$1"; }
kubernetes=$(version k8s.io/kubernetes) helm=$(version helm.sh/helm/v3) crictl=$(version sigs.k8s.io/cri-tools)
IFS=. read -r major minor _ <<<"${kubernetes#v}"

# A build from modules has no version of its own ("v0.0.0-master+$Format"): charts' kubeVersion, version skew and the
# API server's emulation version need a real one.
kube_flags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
  kube_flags+=" -X $package.gitVersion=$kubernetes -X $package.gitMajor=$major -X $package.gitMinor=$minor"
  kube_flags+=" -X $package.gitCommit=modules -X $package.gitTreeState=clean -X $package.buildDate=1970-01-01T00:00:00Z"
done
helm_flags="-s -w -X helm.sh/helm/v3/internal/version.version=$helm"
for package in helm.sh/helm/v3/pkg/lint/rules helm.sh/helm/v3/pkg/chartutil; do
  helm_flags+=" -X $package.k8sVersionMajor=$major -X $package.k8sVersionMinor=$minor"
done

build() { # NAME PACKAGE LDFLAGS; under a temporary name, so that one cut short leaves no half binary
  local start=$SECONDS
  nice -n "${NICE:-5}" go build -ldflags "$3" -o "$BIN/.part" "$2"
  mv "$BIN/.part" "$BIN/$1"
  log "built $1 in $((SECONDS - start)) s"
}
build kube ./kube "$kube_flags"
for program in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl; do
  ln -sf kube "$BIN/$program"
done
build etcd go.etcd.io/etcd/server/v3 "-s -w"
build helm helm.sh/helm/v3/cmd/helm "$helm_flags"
build crictl sigs.k8s.io/cri-tools/cmd/crictl "-s -w -X sigs.k8s.io/cri-tools/pkg/version.Version=$crictl"
build pause ./pause "-s -w"
build box ./box "-s -w"
cd runtime
containerd=$(version github.com/containerd/containerd/v2) plugins=$(version github.com/containernetworking/plugins)
for program in containerd containerd-shim-runc-v2 ctr; do
  build "$program" "github.com/containerd/containerd/v2/cmd/$program" \
    "-s -w -X github.com/containerd/containerd/v2/version.Version=$containerd"
done
mkdir -p "$BIN/.cni"
for plugin in main/bridge main/ptp main/loopback ipam/host-local meta/portmap meta/tuning; do
  build ".cni/${plugin#*/}" "github.com/containernetworking/plugins/plugins/$plugin" \
    "-s -w -X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=$plugins"
done
rm -rf "$BIN/cni" && mv "$BIN/.cni" "$BIN/cni"
touch "$BIN/complete"
log "programs: $BIN ($((SECONDS - started)) s)"
