{{/*
The value of an option of a role's nodes, or nothing; args win over env, and env over config.
[root, role, name of the option in config]
*/}}
{{- define "baton.option" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $name := index . 2 -}}
{{- $node := index $root.Values $role -}}
{{- $table := index $root.Values.config $role | default dict -}}
{{- $value := ternary (get $table $name) (get $root.Values.config $name) (hasKey $table $name) -}}
{{- $variable := printf "BATON_%s" (upper $name) -}}
{{- range $node.env -}}
{{- if and (eq .name $variable) .value -}}{{- $value = .value -}}{{- end -}}
{{- end -}}
{{- $flag := printf "--%s" (replace "_" "-" $name) -}}
{{- $isNext := false -}}
{{- range $node.args -}}
{{- if $isNext -}}{{- $value = . -}}{{- end -}}
{{- $isNext = eq . $flag -}}
{{- if hasPrefix (print $flag "=") . -}}{{- $value = trimPrefix (print $flag "=") . -}}{{- end -}}
{{- end -}}
{{ $value }}
{{- end -}}

{{/* The bytes of a quantity of Kubernetes, such as 4Gi */}}
{{- define "baton.bytes" -}}
{{- $number := regexFind "^[0-9.]+" . -}}
{{- $units := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (float64 $number) (get $units (trimPrefix $number .) | float64) | floor | printf "%.0f" -}}
{{- end -}}

{{/*
The chart's volume in which a folder lies, as two words: name and value of the volume's limit.
Nothing if the folder lies in no volume of the chart. [root, role, folder]
*/}}
{{- define "baton.kvFilesVolume" -}}
{{- $node := index (index . 0).Values (index . 1) -}}{{- $folder := clean (index . 2) -}}
{{- $volumes := dict "/cache" (print "cacheSize " $node.cacheSize) "/dev/shm" (print "shmSize " $node.shmSize) "/tmp" "/tmp 1Gi" -}}
{{- range $node.extraVolumeMounts -}}
{{- $_ := set $volumes (clean .mountPath) "" -}}
{{- end -}}
{{- $place := "" -}}
{{- range $path, $_ := $volumes -}}
{{- if and (hasPrefix (print $path "/") (print $folder "/")) (gt (len $path) (len $place)) -}}
{{- $place = $path -}}
{{- end -}}
{{- end -}}
{{ get $volumes $place }}
{{- end -}}

{{/*
The bytes for --kv-files-size of a role's nodes, or nothing. Files in a volume of the chart get three
quarters of the volume if no value gives a size: Kubernetes evicts a pod whose volume grows beyond
the limit. A size that is not below the limit is an error. [root, role]
*/}}
{{- define "baton.kvFilesSize" -}}
{{- $role := index . 1 -}}
{{- $folder := include "baton.option" (append . "kv_files") -}}
{{- $volume := "" -}}
{{- if and $folder (ne $role "encode") -}}
{{- $volume = include "baton.kvFilesVolume" (append . $folder) -}}
{{- end -}}
{{- if $volume -}}
{{- $limit := include "baton.bytes" (index (splitList " " $volume) 1) | float64 -}}
{{- $size := include "baton.option" (append . "kv_files_size") -}}
{{- if not $size -}}
{{ mulf $limit 0.75 | floor | printf "%.0f" }}
{{- else -}}
{{- $words := regexReplaceAll "^([0-9]+) *([KMG]?)(I?B)?$" (upper (trim $size)) "${1} ${2}" | splitList " " -}}
{{- $unit := dict "K" "Ki" "M" "Mi" "G" "Gi" -}}
{{- if eq (len $words) 2 -}}
{{- if ge (include "baton.bytes" (print (index $words 0) (get $unit (index $words 1))) | float64) $limit -}}
{{- fail (printf "%s: kv_files_size %s: must be less than %s, the limit of the volume of kv_files %s" $role $size $volume $folder) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
