#!/usr/bin/env bash
# Build the extension with the Python at hand, run the tests of the kernels and those that need AMX or a GPU, run
# the benchmarks, and leave their results as JSON in the folder named by the first argument. Tables come last.
set -uo pipefail
out=${1:?usage: scripts/measure.sh OUT [WHEELS]}
wheels=${2:-}
cd "$(dirname "$0")/.."
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/hetero-site "$wheels"/*.whl || exit 3
  export PYTHONPATH=/tmp/hetero-site
fi
export OMP_WAIT_POLICY=passive
cores=$(nproc)
python3 -m pip install -q --no-index --no-build-isolation --no-deps -e . 2>&1 | tail -n 15
status=0
python3 -m pytest -q tests/cpu -p no:cacheprovider 2>&1 | tee "$out/pytest-cpu.txt" | tail -n 15
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
python3 -m pytest -q -m "gpu or amx" -p no:cacheprovider 2>&1 | tee "$out/pytest-marked.txt" | tail -n 8
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
python3 benchmarks/kernels.py --threads 1 $((cores - 1)) --gib 4 --json "$out/kernels.json" || status=1
python3 benchmarks/experts.py --shape qwen3.8-flash-next-125b --shape qwen3.5-122b-a10b --formats "int4 g32" --tokens 1 4 256 1024 8192 \
  --threads $((cores - 1)) --layers 3 --json "$out/experts-int4.json" || status=1
python3 benchmarks/experts.py --shape qwen3.8-flash-next-125b --formats "int8 g32" bf16 --tokens 1 1024 \
  --threads $((cores - 1)) --layers 2 --json "$out/experts-int8-bf16.json" || status=1
exit $status
