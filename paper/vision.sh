#!/usr/bin/env bash
# Trains the rows of the paper's Table 3 and converts as its Table 4 does, on one GPU; records in one file.
#
#   paper/vision.sh IMAGES VIT OUT RESULTS.jsonl [KEY=VALUE ...] [-- KEY=VALUE ...]
#
# IMAGES is a folder of images or of archives, VIT that of a ViT trained on them, OUT one for the runs; settings are of
# the rows, and after -- of the conversions. The rows of the first seed come first, then all conversions, then the rows of
# the second seed. Started again, it goes on where it was. From the environment: JOBS, how many rows at a time (1: one
# alone makes 25,500 images a second on an H200, which fills it); CONVERSIONS, how many of those (3); COLLAB, how `collab`
# is called, where it is not on the path.
set -uo pipefail
images=$1 vit=$2 out=$3 results=$4
shift 4
rows=() conversions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    rows+=("$1")
    shift
done
[ $# -eq 0 ] || conversions=("${@:2}")
configs=$(dirname "$0")/configs/vision
names=(concatenated-768 concatenated-384 concatenated-192 collaborative-384 collaborative-192)
first=("${names[@]/%/.yaml}") second=("${names[@]/%/-seed1.yaml}")
trained=$out/vision/concatenated-768
status=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

many() { # JOBS CONFIG... KEY=VALUE...
    ${COLLAB:-collab} train many --out "$out" --results "$results" --jobs "$1" "${@:2}" data="$images" || status=$?
}

many "${JOBS:-1}" "${first[@]/#/$configs/}" "${rows[@]}"
if [ -f "$trained/record.json" ]; then
    many "${CONVERSIONS:-3}" "$configs"/convert-deit-b3-*.yaml model="$trained/model" "${conversions[@]}"
else
    echo "$trained has no model: it is not converted" >&2
fi
many "${CONVERSIONS:-3}" "$configs"/convert-vit-tiny-*.yaml model="$vit" "${conversions[@]}"
many "${JOBS:-1}" "${second[@]/#/$configs/}" "${rows[@]}"
exit $status
