{{/* Names are fixed: a cluster has one node agent, and other tools look for it by name. */}}
{{- define "sluice.daemonSet" -}}sluice-node{{- end -}}
{{- define "sluice.pluginAccount" -}}sluice-plugin{{- end -}}
{{- define "sluice.runDir" -}}/run/sluice{{- end -}}
{{/* On disk, unlike the run directory: after a reboot the plugin has to decide before any agent runs. sluicectl knows it, too. */}}
{{- define "sluice.diskDir" -}}/var/lib/sluice{{- end -}}
{{/* The same number as in the services; the directories of the sockets are made for it. */}}
{{- define "sluice.brokerUid" -}}64807{{- end -}}

{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/component: node
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selectorLabels" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/part-of: istio
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "sluice.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The file that broker and installer read, and the plugin gets a copy of in its chain entry. */}}
{{- define "sluice.selection" -}}
{{- $selection := .Values.selection -}}
{{- with $selection.enablementSelectors -}}
enablementSelectors:
{{ toYaml . }}
{{ end -}}
excludedNamespaces:
{{ toYaml $selection.excludedNamespaces }}
systemNamespace: {{ $selection.systemNamespace | quote }}
dnsCapture: {{ $selection.dnsCapture }}
ipv6: {{ $selection.ipv6 }}
probeIpv4: {{ $selection.probeIpv4 | quote }}
probeIpv6: {{ $selection.probeIpv6 | quote }}
ownPods:
  namespace: {{ .Release.Namespace | quote }}
  daemonSet: {{ include "sluice.daemonSet" . | quote }}
{{- end -}}

{{/* The fields of profiles for AppArmor came with Kubernetes 1.30; before, it was an annotation per container. */}}
{{- define "sluice.hasAppArmorField" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}true{{ end -}}
{{- end -}}

{{/* Names of the containers that are rendered, with their values. */}}
{{- define "sluice.containers" -}}
netns-executor: executor
{{- if ne .Values.profile "enrolOnAdd" }}
netns-opener: opener
{{- end }}
ambient-broker: broker
installer: installer
{{- if .Values.spares }}
netns-executor-spare: executor
ambient-broker-spare: broker
{{- end }}
{{- end -}}

{{/* dict root, name (the key in values), uid */}}
{{- define "sluice.securityContext" -}}
{{- $values := index .root.Values .name -}}
runAsUser: {{ .uid }}
runAsGroup: {{ .uid }}
runAsNonRoot: {{ ne (.uid | toString) "0" }}
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with $values.capabilities }}
  add: {{ toJson . }}
  {{- end }}
seccompProfile:
{{ toYaml $values.seccompProfile | indent 2 }}
{{- if and $values.appArmorProfile (include "sluice.hasAppArmorField" .root) }}
appArmorProfile:
{{ toYaml $values.appArmorProfile | indent 2 }}
{{- end }}
{{- end -}}

{{/* The annotation's word for a profile. */}}
{{- define "sluice.appArmorWord" -}}
{{- if eq .type "Localhost" -}}
localhost/{{ .localhostProfile }}
{{- else if eq .type "RuntimeDefault" -}}
runtime/default
{{- else -}}
unconfined
{{- end -}}
{{- end -}}

{{/* dict root, name, binary: what all containers have in common */}}
{{- define "sluice.common" -}}
image: {{ include "sluice.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: ["/opt/sluice/bin/{{ .binary }}"]
resources:
{{ toYaml (index .root.Values .name).resources | indent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{- define "sluice.logLevel" -}}
- name: RUST_LOG
  value: {{ (index .root.Values .name).logLevel | quote }}
{{- end -}}

{{/* Probes of a container that answers through a sub-command of its own binary: dict binary, alive (arguments) */}}
{{- define "sluice.execProbes" -}}
{{- $command := concat (list (printf "/opt/sluice/bin/%s" .binary) "healthcheck") (.alive | default list) | toJson -}}
livenessProbe:
  exec: {command: {{ $command }}}
  # None is asked for at the start: each look costs the node a process in the container, while pods wait for the agent. Whether
  # the agent works is what the broker's readiness says.
  initialDelaySeconds: 10
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 4
{{- end -}}

{{- define "sluice.retireHook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{/* How long one container may wait for another at the end, so that its own end fits into what the kubelet allows. */}}
{{- define "sluice.lastSeconds" -}}
{{- min 20 (sub .Values.terminationGracePeriodSeconds 5) -}}
{{- end -}}

{{/* As the kubelet would mount it, but only where it is asked for. */}}
{{- define "sluice.tokenVolume" -}}
- name: api-token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
{{- end -}}
