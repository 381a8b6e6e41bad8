{{/* What the schema cannot say. Each message: which value, what is wrong, what to do. */}}
{{- define "sluice.validate" -}}
{{- $values := .Values -}}
{{- $needed := dict "executor" (list "NET_ADMIN") -}}
{{- if ne $values.profile "enrolOnAdd" -}}
{{- $_ := set $needed "opener" (list "SYS_ADMIN" "SYS_PTRACE") -}}
{{- end -}}
{{- range $container, $capabilities := $needed -}}
{{- range $capability := $capabilities -}}
{{- if not (has $capability (index $values $container).capabilities) -}}
{{- $hint := "" -}}
{{- if eq $container "opener" -}}{{- $hint = "; to run without it, set profile=enrolOnAdd" -}}{{- end -}}
{{- fail (printf "%s.capabilities: %s is missing, and %s cannot work without it%s" $container $capability $container $hint) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $values.retire.capabilities -}}
{{- fail (printf "retire.capabilities: %s: it only asks the API server, and runs without capabilities" .) -}}
{{- end -}}
{{- range $values.broker.capabilities -}}
{{- fail (printf "broker.capabilities: %s: the broker reads what the API server and ztunnel send, and runs without capabilities" .) -}}
{{- end -}}
{{- $surge := toString $values.updateStrategy.maxSurge -}}
{{- $unavailable := toString $values.updateStrategy.maxUnavailable -}}
{{- if eq (eq $surge "0") (eq $unavailable "0") -}}
{{- fail (printf "updateStrategy: maxSurge is %s and maxUnavailable %s: exactly one of them has to be 0" $surge $unavailable) -}}
{{- end -}}
{{- $platform := include "sluice.platform" . | fromYaml -}}
{{- if eq (clean $platform.binDir) (clean $platform.confDir) -}}
{{- fail (printf "cni.binDir and cni.confDir are both %s: the runtime keeps plugins and configurations apart" $platform.binDir) -}}
{{- end -}}
{{- $mount := $values.cni.binMount -}}
{{- if and $mount (not (hasPrefix (printf "%s/" $mount) $platform.binDir)) -}}
{{- fail (printf "cni.binMount: cni.binDir, which is %s, is not below %s" $platform.binDir $mount) -}}
{{- end -}}
{{- if and (ne $platform.mode "owned") $values.cni.ownedFileName -}}
{{- fail (printf "cni.ownedFileName is set, but cni.mode is %s and makes no such file: leave it out, or set cni.mode=owned" $platform.mode) -}}
{{- end -}}
{{- if and (eq $platform.mode "standAlone") $values.cni.primaryFileName -}}
{{- fail "cni.primaryFileName is set, but cni.mode is standAlone and looks at no primary network: leave it out, or set cni.mode=owned" -}}
{{- end -}}
{{- end -}}
