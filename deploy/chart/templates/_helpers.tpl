{{- define "antiphon.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "antiphon.labels" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Selector of pods; takes (dict "root" . "part" "host"). */}}
{{- define "antiphon.selector" -}}
app.kubernetes.io/name: antiphon
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "antiphon.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{- define "antiphon.secret" -}}
{{ .Values.existingSecret | default (printf "%s-keys" (include "antiphon.name" .)) }}
{{- end -}}

{{/* The store's URL, as a variable of the environment. */}}
{{- define "antiphon.state" -}}
- name: ANTIPHON_STATE
{{- if and .Values.store.valkey.enabled (not .Values.store.url) }}
  value: redis://{{ include "antiphon.name" . }}-valkey:6379/0
{{- else }}
  valueFrom: {secretKeyRef: {name: {{ include "antiphon.secret" . }}, key: state}}
{{- end }}
{{- end -}}

{{/* The key of /metrics, and the trusted proxies; takes (dict "root" . "proxies" "10.0.0.0/8"). */}}
{{- define "antiphon.watched" -}}
- name: ANTIPHON_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ include "antiphon.secret" .root }}, key: metrics-key}}
- {name: ANTIPHON_TRUSTED_PROXIES, value: {{ .proxies | quote }}}
{{- end -}}

{{- define "antiphon.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "antiphon.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Spread over nodes and zones; takes (dict "root" . "part" "host"). */}}
{{- define "antiphon.spread" -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "antiphon.selector" $ | fromYaml | toJson }}}
{{- end }}
{{- end -}}

{{- define "antiphon.hostSettings" -}}
{{- range $key, $value := .Values.host.env }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- with .Values.host.profile }}
- {name: ANTIPHON_PROFILE, value: {{ . }}}
{{- end }}
- {name: ANTIPHON_LOG_FORMAT, value: json}
{{- end -}}

{{/* The same, in braces. */}}
{{- define "antiphon.match" -}}
{matchLabels: {{ include "antiphon.selector" . | fromYaml | toJson }}}
{{- end -}}
