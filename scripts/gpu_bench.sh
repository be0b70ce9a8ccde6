#!/usr/bin/env bash
# Build the extension on a machine with a GPU, then tests, kernels, hand-off and whole models, each step with a limit
# of its own, so that a hang costs little. Results are JSON in the folder OUT, all output is in OUT/log.txt, and a
# short table comes last.
#
#   STEPS="build tests kernels variants handoff small decode batch desktop prefill reality"   what to do; default: build small decode
#   MODEL, SMALL   what is measured; VRAM, RAM, THREADS, CPU_CAP   of the machine
#   TESTS          more arguments of pytest, for scripts/gpu_tests.sh
#   DECODE, BATCH, PREFILL, DESKTOP, SMALL_OPTIONS   options of hetero bench, see below
#   LIMIT_<STEP>   seconds, e.g. LIMIT_decode=300
set -uo pipefail
out=${1:?usage: scripts/gpu_bench.sh OUT [WHEELS]}
wheels=${2:-}
cd "$(dirname "$0")/.."
mkdir -p "$out"
log=$out/log.txt
steps=${STEPS:-build small decode}
model=${MODEL:-synthetic:qwen3.8-flash-next-125b}
small=${SMALL:-synthetic:qwen3-30b-a3b}
cores=$(nproc)
threads=${THREADS:-$((cores > 2 ? cores - 1 : 1))}
common=(--ram "${RAM:-120GiB}" --threads "$threads")
[ -z "${VRAM-24GiB}" ] || common+=(--vram "${VRAM-24GiB}") # empty: no cap, and no GPU needed
export OMP_WAIT_POLICY=passive HETERO_STATS=off PYTHONUNBUFFERED=1
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/hetero-site "$wheels"/*.whl || exit 3
  export PYTHONPATH=/tmp/hetero-site
fi

status=0
# step NAME SECONDS LINES COMMAND...: its last LINES lines are shown, all of them logged.
step() {
  local name=$1 limit_name=LIMIT_$1 limit=$2 lines=$3 began=$SECONDS code
  shift 3
  [[ " $steps " == *" $name "* ]] || return 0
  limit=${!limit_name:-$limit}
  echo "== $name (at most $limit s): $*" >>"$log"
  timeout -k 10 "$limit" "$@" >"$out/.step" 2>&1
  code=$?
  cat "$out/.step" >>"$log"
  echo "== $name: exit $code after $((SECONDS - began)) s"
  tail -n "$lines" "$out/.step"
  [ $code -eq 0 ] || status=1
}

bench() { # OUT.json OPTIONS...
  local json=$1
  shift
  python3 -m hetero.cli bench "$@" --json "$out/$json"
}
export -f bench
export out
run_bench() { step "$1" "$2" 45 bash -c 'bench "$@"' bench "${@:3}"; }

read -ra tests_options <<<"${TESTS:-}"
read -ra small_options <<<"${SMALL_OPTIONS:---layers 8 --routing local,uniform --tokens 64 --runs 3 --context 512 --prefill 512 --serial}"
read -ra decode_options <<<"${DECODE:---routing local,uniform --serial --prefill 512,2048,8192}"
read -ra batch_options <<<"${BATCH:---routing local,uniform --batch 8 --runs 3}"
read -ra prefill_options <<<"${PREFILL:---runs 3 --tokens 8 --context 64 --prefill 512,2048,8192}"
read -ra desktop_options <<<"${DESKTOP:---routing local,uniform --cpu-gbps-cap ${CPU_CAP:-65} --share 0 --predict rtx4090-7950x}"

step build 240 4 python3 -m pip install -q --no-index --no-build-isolation --no-deps -e .
step tests 520 40 scripts/gpu_tests.sh "$out/tests" "${tests_options[@]}"
[ -f benchmarks/gpu_kernels.py ] && step kernels 120 40 python3 benchmarks/gpu_kernels.py
step variants 150 60 python3 benchmarks/step_variants.py --threads "$threads" --json "$out/variants.json"
step handoff 90 20 python3 benchmarks/handoff.py --shape qwen3.8-flash-next-125b --layers 8 --json "$out/handoff.json"
run_bench small 150 small.json "$small" "${common[@]}" "${small_options[@]}"
run_bench decode 420 decode.json "$model" "${common[@]}" "${decode_options[@]}"
run_bench batch 420 batch.json "$model" "${common[@]}" "${batch_options[@]}"
run_bench prefill 300 prefill.json "$model" "${common[@]}" "${prefill_options[@]}"
run_bench desktop 300 desktop.json "$model" "${common[@]}" "${desktop_options[@]}"
step reality 300 20 scripts/plan_reality.sh "$out/plan"
rm -f "$out/.step"
echo
python3 scripts/bench_table.py "$out"/*.json
exit $status
