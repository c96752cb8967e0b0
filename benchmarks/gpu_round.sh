#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole GPU round: report and self-test, gpu tests, compute-sanitizer on small sizes, benchmark.
# Works on an installed fused-ops or on a checkout that holds the built libraries; a short table
# comes last. Ends inside ten minutes. $OUT (default benchmarks/results) takes what it writes.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:tests${PYTHONPATH:+:$PYTHONPATH} FUSED_OPS_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1
OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
declare -A verdict

step() { # name, command...
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  if "$@"; then verdict[$name]="ok"; else verdict[$name]="FAILED"; fi
  verdict[$name]+=" ($((SECONDS - start)) s)"
}

sanitize() { # tool
  timeout 60 compute-sanitizer --tool "$1" --error-exitcode 1 --kernel-name kns=forward_kernel \
    "$PYTHON" benchmarks/sanitizer_cases.py >"$OUT/sanitizer-$1.txt" 2>&1 ||
    { tail -n 20 "$OUT/sanitizer-$1.txt"; return 1; }
  tail -n 1 "$OUT/sanitizer-$1.txt"
}

step report "$PYTHON" -m fused_ops
step tests timeout 240 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests --show-capture=no \
  --junitxml="$OUT/gpu-tests.xml"
for tool in memcheck racecheck initcheck synccheck; do
  step "$tool" sanitize "$tool"
done
step benchmark timeout 120 "$PYTHON" -m benchmarks --device cuda --seconds 0.3 --output "$OUT/gpu.json"

steps=()
for name in report tests memcheck racecheck initcheck synccheck benchmark; do
  steps+=("$name=${verdict[$name]}")
done
"$PYTHON" -m benchmarks.round_summary "$OUT" "${steps[@]}"
