#!/usr/bin/env bash
# Trains rows of the paper's Table 2 side by side on one GPU, converts the baseline, and keeps all records in one file.
#
#   paper/translation.sh PACKED OUT RESULTS.jsonl [FILE.yaml ...] [KEY=VALUE ...]
#
# PACKED is a folder that paper/configs/translation/data.yaml packed, OUT a folder for the runs; the files are rows of
# paper/configs/translation, all of them if none is named, and settings given here win over theirs. With max_seconds=N the
# rows train for N seconds from the start of the first, and all end at the same update; without, they make the updates
# that the files say. Started again, it goes on where it was.
#
# Then the model of concatenated-512.yaml is converted, one of shared heads translates a few sentences for the README, and
# what updates take alone is measured. From the environment: JOBS, how many rows at a time (all); WAYS, how to convert
# (weights inputs; refined is another, and takes longer); CONVERT, settings of the conversions; PYTHON, the interpreter that
# has collab; MPS=1 starts NVIDIA's MPS, by which processes share the GPU instead of taking turns. All that runs on the GPU
# must use it then, for it counts as one where turns are taken.
set -uo pipefail
packed=$1 out=$2 results=$3
shift 3
here=$(dirname "$0")
rows=() settings=("packed=$packed")
for argument in "$@"; do
    case $argument in
    max_seconds=*) settings+=("$argument" "pace=$out/pace") ;;
    *=*) settings+=("$argument") ;;
    *) rows+=("$argument") ;;
    esac
done
if [ ${#rows[@]} -eq 0 ]; then
    rows=("$here"/configs/translation/co{ncatenated,llaborative}-{512,64,128,256,512-seed1,64-seed1}.yaml)
fi
python=${PYTHON:-python}
collab() { $python -c 'from collab.cli import main; main()' "$@"; }
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=2

if [ -n "${MPS:-}" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
fi

# A time that began for runs of which none came to its end begins again.
[ -f "$out/pace/end" ] || rm -rf "$out/pace"

# Once for all: the packed corpus becomes arrays that every run maps.
collab train translation --packed "$packed" --prepare-only true --out "$out/unpacked" --quiet >/dev/null || exit
status=0
collab train many "${rows[@]}" "${settings[@]}" --out "$out" --results "$results" --jobs "${JOBS:-${#rows[@]}}" || status=$?

for name in collaborative-128 collaborative-64 collaborative-512; do
    if [ -f "$out/translation/$name/record.json" ]; then
        $python "$here/translation_example.py" "$out/translation/$name" "$results"
        break
    fi
done &
example=$!
baseline=$out/translation/concatenated-512/model
if [ -d "$baseline" ]; then
    conversions=()
    for way in ${WAYS:-weights inputs}; do conversions+=("$here/configs/translation/convert-$way.yaml"); done
    # shellcheck disable=SC2086 # settings, one a word
    collab train many "${conversions[@]}" packed="$packed" model="$baseline" ${CONVERT:-} \
        --out "$out" --results "$results" --jobs ${#conversions[@]} || status=$?
else
    echo "$baseline is not there: nothing is converted" >&2
fi
wait $example || status=$?
kinds=()
for row in "${rows[@]}"; do
    case $row in *-seed*) ;; *) kinds+=("$row") ;; esac
done
$python "$here/translation_speed.py" "$packed" "$results" "${kinds[@]}" "${settings[@]}" || status=$?
exit $status
