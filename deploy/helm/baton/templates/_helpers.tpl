{{- define "baton.name" -}}
{{- default (ternary .Release.Name (printf "%s-baton" .Release.Name) (contains "baton" .Release.Name)) .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select the pods of a component; [root, component]. */}}
{{- define "baton.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "baton.labels" -}}
{{- $root := index . 0 -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* Roles of nodes that the chart makes, as words. */}}
{{- define "baton.roles" -}}
prefill decode{{ if include "baton.encodes" . }} encode{{ end }}
{{- end -}}

{{/* Not empty if there are encode nodes. */}}
{{- define "baton.encodes" -}}
{{- if or (gt (.Values.encode.replicas | int) 0) .Values.autoscaling.encode.enabled }}yes{{ end -}}
{{- end -}}

{{/* One for nodes of both roles: whatever makes the pods of one role anew is a revision of both. */}}
{{- define "baton.revision" -}}
{{- if .Values.revision -}}
{{ .Values.revision }}
{{- else -}}
{{- $values := dict "image" .Values.images.node "app" .Chart.AppVersion "model" .Values.model "config" (omit .Values.config "encode") "tls" .Values.tls.source "kv" (omit .Values.kv "encodingsPort") -}}
{{- range $role := list "prefill" "decode" -}}
{{- $_ := set $values $role (omit (index $.Values $role) "replicas" "maxSurge" "maxUnavailable") -}}
{{- end -}}
{{- if include "baton.encodes" . -}}
{{- $_ := set $values "encodingsPort" .Values.kv.encodingsPort -}}
{{- end -}}
{{ $values | toJson | sha256sum | trunc 12 }}
{{- end -}}
{{- end -}}

{{/* [root, image] */}}
{{- define "baton.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) }}
{{- end -}}
{{- end -}}

{{/* host:port on all addresses of the pod; [root, port] */}}
{{- define "baton.anywhere" -}}
{{ printf "%s:%v" (ternary "[::]" "0.0.0.0" (eq (index . 0).Values.ipFamily "IPv6")) (index . 1 | int) }}
{{- end -}}

{{/* host:port of the pod's own address, which peers dial; [root, port] */}}
{{- define "baton.podAddress" -}}
{{ printf "%s:%v" (ternary "[$(POD_IP)]" "$(POD_IP)" (eq (index . 0).Values.ipFamily "IPv6")) (index . 1 | int) }}
{{- end -}}

{{/* A table of the configuration file: TOML's scalars and lists are written as JSON's. */}}
{{- define "baton.toml" -}}
{{- range $key, $value := . }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.tlsSecret" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}
{{- if eq $root.Values.tls.source "certManager" -}}
{{ include "baton.name" $root }}-{{ $component }}-tls
{{- else -}}
{{ index $root.Values.tls.secrets $component }}
{{- end -}}
{{- end -}}

{{/* Options that every program gets; [root, component] */}}
{{- define "baton.commonArgs" -}}
{{- $root := index . 0 -}}
- --config=/etc/baton/baton.toml
- {{ printf "--model=%s" $root.Values.model.path | quote }}
- --api-keys-file=/etc/baton-auth/keys.toml
{{- if eq $root.Values.tls.source "none" }}
- --insecure
{{- else }}
- --tls-cert=/etc/baton-tls/tls.crt
- --tls-key=/etc/baton-tls/tls.key
- --tls-ca=/etc/baton-tls/ca.crt
{{- end }}
{{- end -}}

{{- define "baton.scheme" -}}
{{ ternary "HTTP" "HTTPS" (eq .Values.tls.source "none") }}
{{- end -}}

{{- define "baton.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser | int }}
runAsGroup: {{ .Values.podSecurity.runAsUser | int }}
fsGroup: {{ .Values.podSecurity.fsGroup | int }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "baton.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* [root, component] */}}
{{- define "baton.volumes" -}}
{{- $root := index . 0 -}}
- name: config
  configMap:
    name: {{ include "baton.name" $root }}
- name: auth
  secret:
    secretName: {{ $root.Values.auth.existingSecret | quote }}
    defaultMode: 0440
    items:
      - {key: keys.toml, path: keys.toml}
{{- if eq (index . 1) "router" }}
      - {key: cache-salt, path: cache-salt}
{{- end }}
{{- if ne $root.Values.tls.source "none" }}
- name: tls
  secret:
    secretName: {{ include "baton.tlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
- name: model
  {{- toYaml $root.Values.model.volume | nindent 2 }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- $component := index . 1 -}}
{{- with (index $root.Values $component).extraVolumes }}
{{- range . }}
{{- if has .name (list "config" "auth" "tls" "model" "tmp" "cache" "shm") }}
{{- fail (printf "%s.extraVolumes: the chart has a volume %s of its own; choose another name" $component .name) }}
{{- end }}
{{- end }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* [root, component] */}}
{{- define "baton.volumeMounts" -}}
{{- $root := index . 0 -}}
- {name: config, mountPath: /etc/baton, readOnly: true}
- {name: auth, mountPath: /etc/baton-auth, readOnly: true}
{{- if ne $root.Values.tls.source "none" }}
- {name: tls, mountPath: /etc/baton-tls, readOnly: true}
{{- end }}
- {name: model, mountPath: /models, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- with (index $root.Values (index . 1)).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where pods of a component go; [root, component, its values] */}}
{{- define "baton.placement" -}}
{{- $values := index . 2 -}}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.spreadBy }}
topologySpreadConstraints:
{{- range $values.spreadBy }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A container is told anew when its configuration changes. */}}
{{- define "baton.podAnnotations" -}}
{{- $root := index . 0 -}}
checksum/config: {{ include (print $root.Template.BasePath "/config.yaml") $root | sha256sum }}
{{- with (index . 1).podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}
