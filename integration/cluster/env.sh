#!/bin/bash
# Prints what a shell needs in order to use the cluster:   eval "$(integration/cluster/env.sh)"
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cat <<TEXT
export INSTANCE=$I SLUICE_CLUSTER_DIR=$W KUBECONFIG=$KUBECONFIG
export PATH=$BIN:\$PATH
TEXT
