# The one entry point. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

HOST := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
HOST_ENV := $(shell echo "$(HOST)" | tr 'a-z-' 'A-Z_')
# Shipped binaries are static (no libc of the node is involved) and not position independent (start-up is faster).
# Only where --target is given: procedural macros cannot be linked so.
STATIC := -C target-feature=+crt-static -C relocation-model=static
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
# They are the same wherever they are built: places in dependencies, in our code and in generated code have names in them that do not
# tell where that was. Of several that match, rustc takes the last.
ANYWHERE := --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo --remap-path-prefix=$(CURDIR)=sluice \
  --remap-path-prefix=$(abspath $(TARGET_DIR))=sluice/target
DIST := $(abspath $(TARGET_DIR))/dist
# The same binaries, built in a third of the time and somewhat slower and larger: for tests.
LEAN := $(abspath $(TARGET_DIR))/lean-dist
# Which of the two a target takes; BUILD=lean or BUILD=dist on the command line decides for all.
TESTED := $(or $(BUILD),lean)
SHIPPED := $(or $(BUILD),dist)
binaries = $(if $(filter lean,$(1)),$(LEAN),$(DIST))
SERVICES := ambient-broker installer sluice-cni-removed sluicectl standin-proxy sluice-demo sluice-bench floor-empty peak-memory
SMALL := netns-executor netns-opener

# What the tests compare with and build on; the demo needs none of it.
PACKAGES := nftables iptables iproute2 ipset conntrack strace procps containernetworking-plugins
TOOLS := nft iptables-nft-save iptables-legacy-save ip ipset conntrack strace ps

# What the cluster needs besides; its programs are built from Go modules (integration/cluster/build.sh).
CLUSTER_PACKAGES := runc busybox-static iptables nftables ipset conntrack iproute2 procps util-linux openssl
CLUSTER_TOOLS := runc nft iptables-nft-save ipset conntrack ip pgrep nsenter openssl
CLUSTER := integration/cluster

.PHONY: setup-cluster cluster cluster-down test-cluster
# The container image: these binaries, under this name, in this archive.
IMAGE := localhost/sluice:dev
IMAGE_BINARIES := netns-executor netns-opener ambient-broker installer sluice-cni-removed sluicectl sluice-cni
IMAGE_CONTEXT := $(abspath $(TARGET_DIR))/image/context
IMAGE_ARCHIVE := $(abspath $(TARGET_DIR))/image/sluice.oci.tar

.PHONY: help setup dist lean image image-archive buildah demo test fuzz bench lint fmt bless deny clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: ## install the tools that the tests use (Debian, Ubuntu)
	@missing=""; for tool in $(TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	[ -x /usr/lib/cni/bridge ] || missing="$$missing bridge"; \
	if [ -n "$$missing" ]; then \
	  echo "installing packages for:$$missing"; \
	  command -v apt-get >/dev/null || { echo "no apt-get here: install by hand: $(PACKAGES)" >&2; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends $(PACKAGES); \
	fi

dist: export CARGO_TARGET_$(HOST_ENV)_RUSTFLAGS := $(STATIC) $(ANYWHERE)
dist: ## build the shipped binaries into target/dist
	cargo build --locked --release --target $(HOST) $(foreach bin,$(SERVICES),--bin $(bin))
	cargo build --locked --profile plugin --target $(HOST) -p sluice-cni
	cargo build --locked --profile small --target $(HOST) $(foreach bin,$(SMALL),--bin $(bin))
	@mkdir -p $(DIST)
	@for bin in $(SERVICES); do install -m 0755 $(TARGET_DIR)/$(HOST)/release/$$bin $(DIST)/$$bin; done
	@install -m 0755 $(TARGET_DIR)/$(HOST)/plugin/sluice-cni $(DIST)/sluice-cni
	@for bin in $(SMALL); do install -m 0755 $(TARGET_DIR)/$(HOST)/small/$$bin $(DIST)/$$bin; done
	@ln -f $(DIST)/sluicectl $(DIST)/kubectl-sluice

lean: export CARGO_TARGET_$(HOST_ENV)_RUSTFLAGS := $(STATIC) $(ANYWHERE)
lean: ## build the binaries as tests run them into target/lean-dist
	cargo build --locked --profile lean --target $(HOST) $(foreach bin,$(SERVICES) $(SMALL) sluice-cni,--bin $(bin))
	@mkdir -p $(LEAN)
	@for bin in $(SERVICES) $(SMALL) sluice-cni; do install -m 0755 $(TARGET_DIR)/$(HOST)/lean/$$bin $(LEAN)/$$bin; done
	@ln -f $(LEAN)/sluicectl $(LEAN)/kubectl-sluice

image: $(SHIPPED) buildah ## build the container image without a daemon: target/image/sluice.oci.tar (needs root)
	@$(MAKE) --no-print-directory image-archive

buildah:
	@command -v buildah >/dev/null || \
	  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends buildah; }

# From what `make dist` left. Nothing of this run is in the result: no time, no host name, no user, no order of a directory;
# so two builds of the same binaries are the same archive, byte for byte.
image-archive:
	@rm -rf $(IMAGE_CONTEXT) && mkdir -p $(IMAGE_CONTEXT)/bin
	@for bin in $(IMAGE_BINARIES); do install -m 0755 $(call binaries,$(SHIPPED))/$$bin $(IMAGE_CONTEXT)/bin/; done
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
	buildah() { command buildah --storage-driver vfs --root "$$work/storage" --runroot "$$work/run" "$$@"; }; \
	buildah build --quiet --isolation chroot --format oci --timestamp 0 --identity-label=false --layers=false \
	  --file Containerfile --tag $(IMAGE) $(IMAGE_CONTEXT) >/dev/null; \
	buildah push --quiet $(IMAGE) oci:$$work/layout:$(IMAGE); \
	mkdir -p $(dir $(IMAGE_ARCHIVE)); \
	tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
	  -C $$work/layout -cf $$work/archive blobs index.json oci-layout; \
	mv $$work/archive $(IMAGE_ARCHIVE); \
	grep -o '"digest":"[^"]*"' $$work/layout/index.json; \
	echo "$(IMAGE) -> $(IMAGE_ARCHIVE), $$(stat -c %s $(IMAGE_ARCHIVE)) bytes"

demo: dist ## show the whole product at work on this machine (needs root; KEEP=1 leaves the node running)
	SLUICE_BIN_DIR=$(DIST) $(DIST)/sluice-demo $(if $(KEEP),--keep)

test: setup $(TESTED) ## install what the tests need and run them all (needs root)
	SLUICE_BIN_DIR=$(call binaries,$(TESTED)) cargo test --locked --workspace --no-fail-fast $(if $(ZTUNNEL_BIN),-- --include-ignored)

setup-cluster: ## install what the cluster needs (Debian, Ubuntu)
	@missing=""; for tool in $(CLUSTER_TOOLS); do command -v $$tool >/dev/null || missing="$$missing $$tool"; done; \
	[ -x /bin/busybox ] || missing="$$missing busybox"; \
	if [ -n "$$missing" ]; then \
	  echo "installing packages for:$$missing"; \
	  command -v apt-get >/dev/null || { echo "no apt-get here: install by hand: $(CLUSTER_PACKAGES)" >&2; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends $(CLUSTER_PACKAGES); \
	fi

cluster: setup-cluster ## start a real Kubernetes cluster on this machine (needs root; INSTANCE=1 for a second one)
	SLUICE_BIN_DIR=$(DIST) $(CLUSTER)/up.sh

cluster-down: ## take the cluster and every trace of it away
	$(CLUSTER)/down.sh

test-cluster: setup-cluster image ## run the tests that need one on a fresh cluster (needs root; TESTS=name chooses, KEEP=1 leaves it)
	$(CLUSTER)/down.sh
	SLUICE_BIN_DIR=$(call binaries,$(SHIPPED)) SLUICE_IMAGE_ARCHIVE=$(IMAGE_ARCHIVE) $(CLUSTER)/up.sh
	eval "$$($(CLUSTER)/env.sh)"; status=0; \
	{ helm upgrade --install sluice charts/sluice --namespace sluice-system --create-namespace \
	    --set image.repository=localhost/sluice,image.tag=dev >/dev/null && \
	  kubectl --namespace sluice-system rollout status daemonset/sluice-node --timeout=120s && \
	  SLUICE_BIN_DIR=$(call binaries,$(SHIPPED)) cargo test --locked -p sluice-integration --features cluster --test chart --test cluster -- \
	    --test-threads=1 --nocapture $(TESTS); } || status=$$?; \
	$(if $(KEEP),,$(CLUSTER)/down.sh;) exit $$status

# The compiler is the pinned one; what the fuzzer's instrumentation needs of it is not stable, hence --rustc-bootstrap.
fuzz: ## let libFuzzer look for annotations that break something (needs cargo-bolero and a C++ compiler; FUZZ_SECONDS=60)
	cargo bolero test --package sluice-fuzz --rustc-bootstrap --sanitizer NONE -T $(or $(FUZZ_SECONDS),60)s \
	  annotations::become_typed_values_or_nothing

bench: setup dist ## measure speed and size against floors taken in the same run (needs root)
	SLUICE_BIN_DIR=$(DIST) $(DIST)/sluice-bench --json $(DIST)/bench.json

lint: ## formatting, clippy, documentation links
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets --features sluice-integration/cluster -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items

deny: ## licences, sources and who may depend on what (needs cargo-deny)
	cargo deny check bans licenses sources

fmt: ## format the code
	cargo fmt --all

bless: ## rewrite golden files; review the diff
	BLESS=1 INSTA_UPDATE=always cargo test --locked --workspace

clean: ## remove build output
	cargo clean
