#!/usr/bin/env bash
# FreeToken and this package on one GPU in one run: the same shape, the same cap on GPU memory, the same tables of
# expert choices. Each step has a limit of its own; all output is in OUT/log.txt.
#
#   scripts/gpu_peers.sh OUT WHEELS PEER_WHEELS PEER
#     WHEELS       of this package's dependencies; PEER_WHEELS of FreeToken 0.1.3 and its dependencies
#     PEER         folder with freetoken_bench.py and freetoken-model
#   STEPS="build ours offload hybrid cpu"   default: build ours offload hybrid
#   VRAM_GIB, RAM, THREADS, RUNS, TOKENS, LIMIT_<STEP>
set -uo pipefail
out=${1:?usage: scripts/gpu_peers.sh OUT WHEELS PEER_WHEELS PEER}
wheels=${2:?a folder of wheels}
peer_wheels=${3:?a folder of the wheels of FreeToken}
peer=$(cd "${4:?the folder of freetoken_bench.py}" && pwd)
cd "$(dirname "$0")/.."
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/log.txt
steps=${STEPS:-build ours offload hybrid}
gib=${VRAM_GIB:-24}
cores=$(nproc)
threads=${THREADS:-$((cores > 2 ? cores - 1 : 1))}
runs=${RUNS:-3}
tokens=${TOKENS:-128}
status=0

has() { [[ " $steps " == *" $1 "* ]]; }
# limited NAME SECONDS LINES COMMAND...
limited() {
  local name=$1 limit_name=LIMIT_$1 limit=$2 lines=$3 began=$SECONDS code
  shift 3
  limit=${!limit_name:-$limit}
  echo "== $name (at most $limit s): $*" >>"$log"
  timeout -k 10 "$limit" "$@" >"$out/.step" 2>&1
  code=$?
  cat "$out/.step" >>"$log"
  echo "== $name: exit $code after $((SECONDS - began)) s"
  grep -E "RESULT|table:|engine ready|HITS|rror" "$out/.step" | tail -n "$lines" || tail -n "$lines" "$out/.step"
  [ $code -eq 0 ] || status=1
}

python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/hetero-site "$wheels"/*.whl || exit 3
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/peer-site "$peer_wheels"/*.whl || exit 3
export OMP_WAIT_POLICY=passive HETERO_STATS=off PYTHONUNBUFFERED=1

if has build; then
  PYTHONPATH=/tmp/hetero-site limited build 240 4 python3 -m pip install -q --no-index --no-build-isolation --no-deps -e .
fi
if has ours; then
  # The tables that the peer draws itself, by its own code.
  PEER=$peer python3 - <<'P' >>"$log" 2>&1 || status=1
import os, sys
import numpy as np
sys.path.insert(0, os.environ["PEER"])
import freetoken_bench
for kind in ("uniform", "local"):
    np.save(f"/tmp/peer-{kind}.npy", freetoken_bench.tables(kind, 48, 512, 10, 1400, 7))
P
  PYTHONPATH=/tmp/hetero-site limited ours 300 30 python3 -m hetero.cli bench synthetic:qwen3.8-flash-next-125b \
    --vram "${gib}GiB" --ram "${RAM:-120GiB}" --threads "$threads" --runs "$runs" --tokens "$tokens" --prompt 512 \
    --routing trace:/tmp/peer-local.npy,trace:/tmp/peer-uniform.npy,router --prefill 512,4096,8000 --json "$out/ours.json"
  python3 scripts/bench_table.py "$out/ours.json"
fi

export GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1
if has offload || has hybrid || has cpu; then
  PYTHONPATH=/tmp/peer-site limited benchbw 90 3 python3 -m freetoken.moe.benchbw --dtype nvfp4
  (cd /tmp && PYTHONPATH=/tmp/peer-site exec python3 "$peer/freetoken_bench.py" cap --gib "$gib" --log "$out/cap.json") \
    >"$out/.cap" 2>&1 &
  cap=$!
  for _ in $(seq 60); do
    grep -q "CAP READY" "$out/.cap" && break
    sleep 0.5
  done
  cat "$out/.cap" >>"$log"
  cd /tmp || exit 3
  for strategy in offload hybrid cpu; do
    has $strategy || continue
    PYTHONPATH=/tmp/peer-site limited $strategy 240 12 python3 "$peer/freetoken_bench.py" run --strategy $strategy \
      --runs "$runs" --tokens "$tokens" --cpu-threads "$threads" --no-hits --long 4096 8000
  done
  kill $cap
  wait $cap 2>/dev/null
  cat "$out/cap.json" 2>/dev/null
fi
rm -f "$out/.step" "$out/.cap"
exit $status
