#!/usr/bin/env bash
# Trains the rows of the paper's Table 3 and converts as its Table 4 does, side by side on one GPU; records in one file.
#
#   paper/vision.sh IMAGES VIT OUT RESULTS.jsonl [KEY=VALUE ...] [-- KEY=VALUE ...]
#
# IMAGES is a folder of images or of archives, VIT that of a ViT trained on them, OUT one for the runs; settings are of
# the rows, and after -- of the conversions. JOBS rows (5) are trained at a time, those of the first seed before those of
# the second; the ViT is converted beside them, and their DeiT-B3 as soon as it is there. Started again, all goes on where
# it was. COLLAB says how `collab` is called, where it is not on the path.
set -euo pipefail
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
export OMP_NUM_THREADS=1

many() { # JOBS CONFIG... KEY=VALUE...
    ${COLLAB:-collab} train many --out "$out" --results "$results" --jobs "$1" "${@:2}" data="$images"
}

many "${JOBS:-5}" "${first[@]/#/$configs/}" "${second[@]/#/$configs/}" "${rows[@]}" &
training=$!
many 3 "$configs"/convert-vit-tiny-*.yaml model="$vit" "${conversions[@]}" &
of_vit=$!
until [ -f "$trained/record.json" ] || ! kill -0 $training 2>/dev/null; do sleep 1; done
[ ! -f "$trained/record.json" ] ||
    many 5 "$configs"/convert-deit-b3-*.yaml model="$trained/model" "${conversions[@]}" || of_deit=$?
wait $of_vit || of_vit=failed
wait $training || training=failed
[ "$training" != failed ] && [ "$of_vit" != failed ] && [ -z "${of_deit:-}" ]
