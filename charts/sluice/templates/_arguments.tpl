{{/* Command lines, each a JSON list. Paths on the right of a mount are as the container sees them. */}}
{{/* All containers are asked to stop at one time, and only the executor can take rules away when the broker asks it: it stops last. */}}
{{- define "sluice.executorArgs" -}}
{{- $selection := .Values.selection -}}
{{- $args := list
  "--run-dir" (include "sluice.runDir" .)
  "--broker-uid" (include "sluice.brokerUid" .)
  "--broker-gid" (include "sluice.brokerUid" .)
  "--stand-by"
  "--linger-seconds" (include "sluice.lastSeconds" .)
  "--drift-interval-ms" (.Values.executor.driftIntervalMs | toString)
  "--full-drift-interval-ms" (.Values.executor.fullDriftIntervalMs | toString)
  "--probe-ipv4" $selection.probeIpv4
  "--probe-ipv6" $selection.probeIpv6 -}}
{{- if .Values.spares -}}{{- $args = concat $args (list "--pod-lease" "/var/lib/lease") -}}{{- end -}}
{{- if not $selection.ipv6 -}}{{- $args = append $args "--no-ipv6" -}}{{- end -}}
{{- if eq .Values.profile "enrolOnAdd" -}}{{- $args = append $args "--no-opener" -}}{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{- define "sluice.openerArgs" -}}
{{- $args := list "--run-dir" (include "sluice.runDir" .) "--stand-by" "--host-proc" "/host/proc" -}}
{{- range include "sluice.netnsPaths" . | fromJsonArray -}}
{{- $args = concat $args (list "--netns-dir" .) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{- define "sluice.brokerArgs" -}}
{{- $args := list
  "--kubernetes"
  "--stand-by"
  "--run-dir" (include "sluice.runDir" .)
  "--selection" "/etc/sluice/selection.yaml"
  "--listen" (printf "%s:%v" .Values.broker.address .Values.broker.port)
  "--zds-socket" (printf "%s/ztunnel.sock" .Values.ztunnel.socketDir)
  "--zds-uids" (join "," .Values.ztunnel.uids)
  "--zds-window" (.Values.ztunnel.window | toString)
  "--drain-seconds" (.Values.broker.drainSeconds | toString)
  "--workload-uids" (printf "0,%s" (include "sluice.brokerUid" .)) -}}
{{- if .Values.spares -}}{{- $args = concat $args (list "--pod-lease" "/var/lib/lease") -}}{{- end -}}
{{- if .Values.ztunnel.required -}}{{- $args = append $args "--require-ztunnel" -}}{{- end -}}
{{- if .Values.takeover.istioCni -}}{{- $args = append $args "--istio-cni" -}}{{- end -}}
{{- toJson $args -}}
{{- end -}}

{{- define "sluice.installerArgs" -}}
{{- $platform := include "sluice.platform" . | fromYaml -}}
{{- $cni := .Values.cni -}}
{{- $args := list "run"
  "--stand-by"
  "--run-dir" (include "sluice.runDir" .)
  "--broker-gid" (include "sluice.brokerUid" .)
  "--ztunnel-dir" .Values.ztunnel.socketDir
  "--ztunnel-gid" (.Values.ztunnel.gid | toString)
  "--cni-bin-dir" (ternary $platform.binDir "/host/opt/cni/bin" (ne $cni.binMount ""))
  "--host-cni-bin-dir" $platform.binDir
  "--cni-net-dir" "/host/etc/cni/net.d"
  "--host-cni-net-dir" $platform.confDir
  "--kubeconfig" (printf "%s/kubeconfig" (include "sluice.diskDir" .))
  "--selection" "/etc/sluice/selection.yaml"
  "--mode" (kebabcase $platform.mode)
  "--when-preempted" $cni.whenPreempted
  "--bin-dir-check" $cni.binDirCheck
  "--static-pods" $cni.staticPods
  "--plugin-log-level" $cni.pluginLogLevel
  "--shutdown-seconds" (include "sluice.lastSeconds" .) -}}
{{- with $cni.ownedFileName -}}{{- $args = concat $args (list "--owned-name" .) -}}{{- end -}}
{{- with $cni.primaryFileName -}}{{- $args = concat $args (list "--primary" .) -}}{{- end -}}
{{- with $cni.runtimeConfig -}}
{{- $args = concat $args (list "--runtime-config" (printf "/host/runtime/%s" (base .))) -}}
{{- end -}}
{{- if $cni.groupRead -}}{{- $args = append $args "--group-read" -}}{{- end -}}
{{- if has "DAC_OVERRIDE" .Values.installer.capabilities -}}{{- $args = append $args "--dac-override" -}}{{- end -}}
{{- if .Values.takeover.istioCni -}}
{{- $args = concat $args (list "--take-over" "--istio-run-dir" .Values.takeover.socketDir) -}}
{{- end -}}
{{- toJson $args -}}
{{- end -}}
