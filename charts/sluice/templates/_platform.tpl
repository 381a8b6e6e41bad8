{{/*
What a platform differs in: binDir and confDir (the container runtime's), netnsDir, mode (how the plugin gets called), seLinux
(an SELinux type), quota (the priority class is admitted only with one). What the user sets wins.
  gke        keeps plugins on the writable partition and admits the priority class with a quota only
  openshift  has Multus, which calls the plugin as a network of its own, from a directory of such; SELinux keeps ordinary containers
             from sockets on the host
  k3s, k3d   keep everything below their data directory (k3s since v1.31; before it was .../data/current/bin)
  microk8s   is a snap
  minikube   with the docker driver keeps namespaces in docker's directory
  talos, kind  differ in nothing; named so that nobody has to guess
*/}}
{{- define "sluice.platforms" -}}
usual: {binDir: /opt/cni/bin, confDir: /etc/cni/net.d, netnsDir: /var/run/netns, mode: owned, seLinux: "", quota: false}
gke: {binDir: /home/kubernetes/bin, quota: true}
openshift: {binDir: /var/lib/cni/bin, confDir: /etc/cni/multus/net.d, mode: standAlone, seLinux: spc_t}
k3s: {binDir: /var/lib/rancher/k3s/data/cni, confDir: /var/lib/rancher/k3s/agent/etc/cni/net.d}
k3d: {binDir: /bin, confDir: /var/lib/rancher/k3s/agent/etc/cni/net.d}
microk8s: {binDir: /var/snap/microk8s/current/opt/cni/bin, confDir: /var/snap/microk8s/current/args/cni-network}
minikube: {netnsDir: /var/run/docker/netns}
talos: {}
kind: {}
{{- end -}}

{{- define "sluice.platform" -}}
{{- $all := include "sluice.platforms" . | fromYaml -}}
{{- $own := dict -}}
{{- with .Values.platform -}}{{- $own = index $all . -}}{{- end -}}
{{- $set := dict -}}
{{- range $key := list "binDir" "confDir" "netnsDir" "mode" -}}
{{- with index $.Values.cni $key -}}{{- $_ := set $set $key . -}}{{- end -}}
{{- end -}}
{{- toYaml (merge $set $own $all.usual) -}}
{{- end -}}

{{/* The paths by which a runtime may name a file of the netns directory: /var/run is a link to /run nearly everywhere. */}}
{{- define "sluice.netnsPaths" -}}
{{- $netnsDir := (include "sluice.platform" . | fromYaml).netnsDir -}}
{{- $paths := list $netnsDir -}}
{{- if hasPrefix "/var/run/" $netnsDir -}}
{{- $paths = append $paths (trimPrefix "/var" $netnsDir) -}}
{{- else if hasPrefix "/run/" $netnsDir -}}
{{- $paths = append $paths (printf "/var%s" $netnsDir) -}}
{{- end -}}
{{- toJson $paths -}}
{{- end -}}
