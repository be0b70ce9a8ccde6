#!/usr/bin/env bash
# Build the extension with the Python at hand, run the tests that need AMX or a GPU, run the benchmarks, and leave
# their results as JSON in the folder named by the first argument. Short tables come last.
set -uo pipefail
out=${1:?usage: scripts/measure.sh OUT [WHEELS]}
wheels=${2:-}
cd "$(dirname "$0")/.."
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/hetero-site "$wheels"/*.whl || exit 3
  export PYTHONPATH=/tmp/hetero-site
fi
python3 -m pip install -q --no-index --no-build-isolation --no-deps -e . 2>&1 | tail -n 15
status=0
python3 -m pytest -q -m "gpu or amx" -p no:cacheprovider 2>&1 | tee "$out/pytest.txt" | tail -n 15
[ "${PIPESTATUS[0]}" -le 0 ] || status=1
for isa in scalar avx2 avx512 amx; do
  HETERO_ISA=$isa python3 -m pytest -q tests/cpu -p no:cacheprovider 2>&1 | tail -n 2
  [ "${PIPESTATUS[0]}" -le 0 ] || status=1
done
python3 benchmarks/kernels.py --json "$out/kernels.json" || status=1
python3 benchmarks/operator.py --json "$out/operator.json" || status=1
exit $status
