#!/usr/bin/env bash
# The tests for a device in several processes at once, which mostly compile kernels, each into one folder's cache; then,
# one after the other, those that look at a clock or at the memory of the whole device. One line for each failure.
#
#   scripts/gpu_tests.sh OUT [MORE OPTIONS OF PYTEST]
#   N       processes; default: a third of the cores, at most 6: a device takes turns with its processes
#   LIMIT   seconds of either part; default 240
# Logs are OUT/tests.txt and OUT/tests_alone.txt. Each process holds no more of the device than its context and models
# of some megabytes. TRITON_CACHE_DIR: where kernels are kept.
set -uo pipefail
out=${1:?usage: scripts/gpu_tests.sh OUT [OPTIONS]}
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
cores=$(nproc)
n=${N:-$((cores / 3 > 6 ? 6 : cores / 3 > 1 ? cores / 3 : 1))}
limit=${LIMIT:-240}
# What measures time, or asks the driver what is free.
alone="bench_on_gpu or stamps_on_gpu or under_a_cap or failing_worker or worker_that_fails or gives_up or rates_are or takes_the_faster"
# pytest cuts its lines to this.
export COLUMNS=240 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
# Where pytest-benchmark is there it warns of several processes, and warnings are errors.
pytest=(python3 -m pytest -v --tb=short -rfE -p no:cacheprovider -p no:benchmark -m "gpu or amx" --durations=15)

status=0
part() { # LOG OPTIONS...
  local log=$out/$1 began=$SECONDS code
  shift
  timeout -k 10 "$limit" "${pytest[@]}" "$@" >"$log" 2>&1
  code=$?
  echo "== $(basename "$log"): exit $code after $((SECONDS - began)) s: $(grep -c ' PASSED\|^PASSED\|PASSED \[' "$log") passed, $(tail -n 1 "$log" | cut -c1-150)"
  grep -aE '^(FAILED|ERROR) ' "$log" | cut -c1-220
  # Of a run that was cut off there is no summary: what was running, and where threads were.
  if [ $code -gt 1 ]; then
    grep -aE 'FAILED|ERROR|crashed while running|Timeout|Fatal' "$log" | grep -avE '^(FAILED|ERROR) ' | cut -c1-200 | sort -u | head -30
  fi
  [ $code -eq 0 ] || status=1
}

spread=()
python3 -c "import xdist" 2>/dev/null && [ "$n" -gt 1 ] && spread=(-n "$n" --dist worksteal)
part tests.txt "${spread[@]}" -k "not ($alone)" "$@" tests/gpu tests/triton tests/decode tests/cpu/test_kernels.py
part tests_alone.txt -k "$alone" "$@" tests/gpu
exit $status
