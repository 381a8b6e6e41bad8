{{/* The containers that can have a spare: dict root, name. Both of a pair are the same but for the name; one of them works. */}}
{{- define "sluice.brokerContainer" -}}
{{- $root := .root -}}
{{- $run := include "sluice.runDir" $root -}}
- name: {{ .name }}
  {{- include "sluice.common" (dict "root" $root "name" "broker" "binary" "ambient-broker") | nindent 2 }}
  args: {{ include "sluice.brokerArgs" $root }}
  env:
    {{- include "sluice.logLevel" (dict "root" $root "name" "broker") | nindent 4 }}
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: SLUICE_DAEMON_SET
      value: {{ include "sluice.daemonSet" $root }}
    - name: SLUICE_PLUGIN_SERVICE_ACCOUNT
      value: {{ include "sluice.pluginAccount" $root }}
  {{- if eq .name "ambient-broker" }}
  # Whichever of the two works has it; it is to be scraped once.
  ports:
    - {name: metrics, containerPort: {{ $root.Values.broker.port }}, protocol: TCP}
  {{- end }}
  securityContext:
    {{- include "sluice.securityContext" (dict "root" $root "name" "broker" "uid" (include "sluice.brokerUid" $root | int)) | nindent 4 }}
  readinessProbe:
    # A rollout waits for it. The kubelet asks as soon as it sees the container run, and again only after a period: at
    # the start the answer comes when the broker is ready.
    httpGet: {path: "/readyz?wait=1", port: {{ $root.Values.broker.port }}}
    periodSeconds: 1
    timeoutSeconds: 2
    failureThreshold: 2
    successThreshold: {{ $root.Values.broker.readyAfterSeconds }}
  livenessProbe:
    httpGet: {path: /healthz, port: {{ $root.Values.broker.port }}}
    periodSeconds: 10
    timeoutSeconds: 2
    failureThreshold: 3
  volumeMounts:
    - {name: run-executor, mountPath: {{ $run }}/executor, readOnly: true}
    - {name: run-broker, mountPath: {{ $run }}/broker}
    - {name: run-node, mountPath: {{ $run }}/node}
    - {name: ztunnel, mountPath: {{ $root.Values.ztunnel.socketDir }}}
    {{- if $root.Values.takeover.istioCni }}
    - {name: istio-cni, mountPath: {{ $run }}/istio-cni}
    {{- end }}
    - {name: selection, mountPath: /etc/sluice, readOnly: true}
    - {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- if $root.Values.spares }}
    - {name: broker-lease, mountPath: /var/lib/lease, readOnly: true}
    {{- end }}
{{- end -}}

{{- define "sluice.executorContainer" -}}
{{- $root := .root -}}
{{- $run := include "sluice.runDir" $root -}}
- name: {{ .name }}
  {{- include "sluice.common" (dict "root" $root "name" "executor" "binary" "netns-executor") | nindent 2 }}
  args: {{ include "sluice.executorArgs" $root }}
  env:
    {{- include "sluice.logLevel" (dict "root" $root "name" "executor") | nindent 4 }}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
  securityContext:
    {{- include "sluice.securityContext" (dict "root" $root "name" "executor" "uid" 0) | nindent 4 }}
  {{- include "sluice.execProbes" (dict "binary" "netns-executor") | nindent 2 }}
  volumeMounts:
    - {name: run-cni, mountPath: {{ $run }}/cni}
    - {name: run-executor, mountPath: {{ $run }}/executor}
    - {name: run-opener, mountPath: {{ $run }}/opener}
    - {name: run-state, mountPath: {{ $run }}/state}
    {{- if $root.Values.spares }}
    - {name: executor-lease, mountPath: /var/lib/lease, readOnly: true}
    {{- end }}
{{- end -}}
