#!/usr/bin/env bash
# Trains rows of the paper's Table 2 side by side on one GPU, and keeps their records in one file.
#
#   paper/translation.sh PACKED OUT RESULTS.jsonl [FILE.yaml ...] [KEY=VALUE ...]
#
# PACKED is a folder that paper/configs/translation/data.yaml packed, OUT a folder for the runs; the files are rows of
# paper/configs/translation, all of them if none is named, and settings given here win over theirs. Started again, it
# goes on where it was. Where NVIDIA's MPS can be had it is used: without it, processes take turns on the GPU instead of
# sharing it. COLLAB says how `collab` is called, where it is not on the path.
set -euo pipefail
packed=$1 out=$2 results=$3
shift 3
rows=() settings=("packed=$packed")
for argument in "$@"; do
    case $argument in
    *=*) settings+=("$argument") ;;
    *) rows+=("$argument") ;;
    esac
done
if [ ${#rows[@]} -eq 0 ]; then
    rows=("$(dirname "$0")"/configs/translation/co*.yaml)
fi
collab=${COLLAB:-collab}
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2

if [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && command -v nvidia-cuda-mps-control >/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi

# Once for all: the packed corpus becomes arrays that every run maps.
$collab train translation --packed "$packed" --prepare-only true --out "$out/unpacked" --quiet >/dev/null
$collab train many "${rows[@]}" "${settings[@]}" --out "$out" --results "$results" --jobs "${#rows[@]}"
