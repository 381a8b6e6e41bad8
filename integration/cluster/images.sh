#!/bin/bash
# Makes the test images into $W/images, without registry, daemon or image builder: OCI layouts in a tar, which
# `ctr images import` takes. The same input gives the same bytes.
#   pause             the sandbox image
#   box               busybox and the test server and clients (build/box): what workload pods run
#   standin-ztunnel   the stand-in for ztunnel, if it is built (`make dist`)
#   sluice            $SLUICE_IMAGE_ARCHIVE, if set (`make image`)
# images.sh import NAME ROOTFS-DIR CONFIG-JSON    makes a further image and imports it into the running node
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
IMAGES=$W/images
DIST=${SLUICE_BIN_DIR:-$RECIPE/../../target/dist}

blob() { # FILE: moves it to its name among the blobs; "DIGEST SIZE"
  local digest size
  digest=$(sha256sum <"$1" | cut -d' ' -f1); size=$(stat -c %s "$1")
  mv "$1" "$BLOBS/$digest"; echo "$digest $size"
}
archive() { tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner "$@"; }

image() { # NAME ROOTFS-DIR FILE CONFIG-JSON (the image configuration's "config" object)
  local name=$1 rootfs=$2 file=$3 config=$4 t arch diff
  t=$(mktemp -d); BLOBS=$t/layout/blobs/sha256; mkdir -p "$BLOBS"
  arch=$(go env GOARCH)
  archive -C "$rootfs" -cf "$t/layer" .
  diff=$(sha256sum <"$t/layer" | cut -d' ' -f1)
  local layer settings manifest
  read -ra layer <<<"$(blob "$t/layer")"
  printf '{"architecture":"%s","os":"linux","created":"1970-01-01T00:00:00Z","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
    "$arch" "$config" "$diff" >"$t/settings"
  read -ra settings <<<"$(blob "$t/settings")"
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%s","size":%s},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:%s","size":%s}]}' \
    "${settings[@]}" "${layer[@]}" >"$t/manifest"
  read -ra manifest <<<"$(blob "$t/manifest")"
  # the annotation gives the image its full name on import
  printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:%s","size":%s,"platform":{"architecture":"%s","os":"linux"},"annotations":{"io.containerd.image.name":"%s","org.opencontainers.image.ref.name":"%s"}}]}' \
    "${manifest[@]}" "$arch" "$name" "${name##*:}" >"$t/layout/index.json"
  printf '{"imageLayoutVersion":"1.0.0"}' >"$t/layout/oci-layout"
  archive -C "$t/layout" -cf "$file" oci-layout index.json blobs
  rm -rf "$t"
}

make_all() {
  local t; t=$(mktemp -d)
  mkdir -p "$IMAGES" "$t/pause"
  install -m 0755 "$BIN/pause" "$t/pause/pause"
  image "$PAUSE_IMAGE" "$t/pause" "$IMAGES/pause.tar" '{"Entrypoint":["/pause"],"User":"65535:65535"}'

  mkdir -p "$t"/box/{bin,etc,proc,sys,dev,root,var/run} "$t/box/tmp"
  chmod 1777 "$t/box/tmp"
  install -m 0755 "$BUSYBOX" "$t/box/bin/busybox"
  local applet
  for applet in $("$BUSYBOX" --list); do [ "$applet" = busybox ] || ln -s busybox "$t/box/bin/$applet"; done
  install -m 0755 "$BIN/box" "$t/box/bin/box"
  printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n' >"$t/box/etc/passwd"
  image "$BOX_IMAGE" "$t/box" "$IMAGES/box.tar" '{"Env":["PATH=/bin"],"Cmd":["/bin/box","serve"]}'

  if [ -x "$DIST/standin-proxy" ]; then
    mkdir -p "$t/ztunnel"
    install -m 0755 "$DIST/standin-proxy" "$t/ztunnel/standin-proxy"
    image "$ZTUNNEL_IMAGE" "$t/ztunnel" "$IMAGES/standin-ztunnel.tar" '{"Entrypoint":["/standin-proxy"]}'
  fi
  if [ -n "${SLUICE_IMAGE_ARCHIVE:-}" ]; then cp "$SLUICE_IMAGE_ARCHIVE" "$IMAGES/sluice.tar"; fi
  rm -rf "$t"
}

case ${1:-} in
  "") make_all ;;
  import)
    mkdir -p "$IMAGES"
    file=$IMAGES/$(tr -c 'a-z0-9\n' - <<<"$2").tar
    image "$2" "$3" "$file" "$4"
    "$RECIPE/node.sh" import "$file"
    ;;
  *) sed -n '2,8s/^# //p' "$0" >&2; exit 2 ;;
esac
