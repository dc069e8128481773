#!/usr/bin/env bash
# Trains rows of the paper's Table 3 side by side on one GPU, and gathers their records in one file.
#
#   paper/vision.sh PACKED OUT [--only NAME,NAME] [--at-once NUMBER] [KEY=VALUE ...]
#
# PACKED is what paper/pack_images.py wrote, OUT a folder for the runs; settings given here win over those of every row.
# Started again, it goes on where it was. Where NVIDIA's MPS can be had it is used: without it, processes take turns on
# the GPU instead of sharing it. Conversions are rows of their own (convert-deit-b3, convert-vit-tiny): name them.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=$1 out=$2
shift 2
rows=$(cd paper/configs/vision && ls -- concatenated-*.yaml collaborative-*.yaml | sed 's/\.yaml$//')
at_once=10
while [ "${1:-}" = --only ] || [ "${1:-}" = --at-once ]; do
    if [ "$1" = --only ]; then rows=${2//,/ }; else at_once=$2; fi
    shift 2
done
mkdir -p "$out"
collab=${COLLAB:-collab}
export OMP_NUM_THREADS=1

if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi

failed=0
for row in $rows; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n || failed=1; done
    $collab train vision --config "paper/configs/vision/$row.yaml" --out "$out/$row" --data "$packed" \
        --cache-folder "$out/.cache" --results "$out/$row.jsonl" "$@" >"$out/$row.log" 2>&1 &
done
while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done
for row in $rows; do
    [ -s "$out/$row.jsonl" ] || { failed=1; echo "no record of $row:"; tail -n 3 "$out/$row.log"; } >&2
done
cat "$out"/*.jsonl >"$out/.all.partial" && mv "$out/.all.partial" "$out/vision-records.txt"
exit $failed
