#!/usr/bin/env bash
# Trains rows of the paper's Table 2 side by side on one GPU, and gathers their records in one file.
#
#   paper/translation.sh PACKED OUT [--only NAME,NAME] [KEY=VALUE ...]
#
# PACKED is a folder that paper/configs/translation/data.yaml packed, OUT a folder for the runs; settings given here win
# over those of every row. Started again, it goes on where it was. Where NVIDIA's MPS can be had it is used: without it,
# processes take turns on the GPU instead of sharing it.
set -euo pipefail
cd "$(dirname "$0")/.."
packed=$1 out=$2
shift 2
rows=$(cd paper/configs/translation && ls -- *.yaml | sed 's/\.yaml$//' | grep -v '^data$')
if [ "${1:-}" = --only ]; then
    rows=${2//,/ }
    shift 2
fi
mkdir -p "$out"
collab=${COLLAB:-collab}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false TORCHINDUCTOR_COMPILE_THREADS=2

if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi

# Once for all: the packed corpus becomes arrays that every run maps.
$collab train translation --packed "$packed" --prepare-only true --out "$out/.data" --quiet >/dev/null
pids=()
for row in $rows; do
    $collab train translation --config "paper/configs/translation/$row.yaml" --out "$out/$row" \
        --results "$out/$row.jsonl" --packed "$packed" "$@" >"$out/$row.log" 2>&1 &
    pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
cat "$out"/*.jsonl >"$out/.all.partial" && mv "$out/.all.partial" "$out/translation-records.txt"
exit $failed
