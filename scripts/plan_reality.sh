#!/usr/bin/env bash
# The plan against reality: three synthetic models by `hetero bench --plan`, one after the other, and a line for each
# figure. Less than four minutes on a machine with a GPU and 110 GiB of main memory.
#
#   MODELS   what is measured; VRAM (empty: no cap, and no GPU needed), RAM, THREADS of the machine
#   OPTIONS  of hetero bench besides; LIMIT seconds of one model
set -uo pipefail
out=${1:?usage: scripts/plan_reality.sh OUT}
cd "$(dirname "$0")/.."
mkdir -p "$out"
models=${MODELS:-qwen3.8-flash-next-125b qwen3-next-80b-a3b qwen3-30b-a3b}
cores=$(nproc)
threads=${THREADS:-$((cores > 2 ? cores - 2 : 1))}
read -ra options <<<"${OPTIONS:---routing local,uniform --tokens 64 --runs 2 --context 1024 --prefill 4096}"
common=(--ram "${RAM:-110GiB}" --threads "$threads" --plan)
[ -z "${VRAM-24GiB}" ] || common+=(--vram "${VRAM-24GiB}")
export OMP_WAIT_POLICY=passive HETERO_STATS=off PYTHONUNBUFFERED=1
status=0
for model in $models; do
  name=$(basename "$model" .json)
  timeout -k 10 "${LIMIT:-130}" "${PYTHON:-python3}" -m hetero.entry bench "synthetic:$model" "${common[@]}" "${options[@]}" \
    --json "$out/$name.json" >"$out/$name.txt" 2>&1 || { status=1; tail -n 2 "$out/$name.txt"; }
done
"${PYTHON:-python3}" scripts/plan_against.py "$out"/*.json
exit $status
