#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole GPU round: report and self-test, gpu tests, compute-sanitizer on small sizes, benchmark.
# Works on an installed fused-ops or on a checkout that holds the built libraries, and needs PyTorch
# and pytest alone. A short table comes last. Ends inside ten minutes: what comes late gets less
# time, and the benchmark measures the headline first. $OUT (default benchmarks/results) takes what
# it writes: gpu-tests.xml, sanitizer-*.txt, gpu.json, gpu-round.json.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.:tests${PYTHONPATH:+:$PYTHONPATH} FUSED_OPS_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1
OUT=${OUT:-benchmarks/results}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-570} # seconds for everything
mkdir -p "$OUT"
declare -A verdict
steps=()

left() { # seconds wanted -> those that remain of them, at least 5
  local rest=$((LIMIT - 5 - SECONDS))
  echo $((rest < 5 ? 5 : rest < $1 ? rest : $1))
}

step() { # name, seconds, command...
  local name=$1 limit start=$SECONDS
  limit=$(left "$2")
  shift 2
  echo "== $name"
  if timeout -k 5 "$limit" "$@"; then
    verdict[$name]="ok"
  else
    local status=$?
    verdict[$name]="FAILED"
    if [ "$status" = 124 ]; then verdict[$name]="TIMED OUT after $limit s"; fi
  fi
  verdict[$name]+=" ($((SECONDS - start)) s)"
  steps+=("$name")
}

sanitize() { # op, seconds: the four tools at the same time, for most of it is the host's
  local op=$1 limit tool name log status seconds lines
  limit=$(left "$2")
  for tool in memcheck racecheck initcheck synccheck; do
    (
      # What these two cannot see otherwise: csrc/common/sanitizers.h.
      if [ $tool = racecheck ]; then export FUSED_OPS_RACECHECK=1; fi
      if [ $tool = initcheck ]; then export FUSED_OPS_INITCHECK=1; fi
      SECONDS=0
      timeout -k 5 "$limit" compute-sanitizer --tool $tool --error-exitcode 1 --print-limit 20 \
        "$PYTHON" -m benchmarks.sanitizer_cases --only "$op" >"$OUT/sanitizer-$tool-$op.txt" 2>&1
      echo "$? $SECONDS" >"$OUT/sanitizer-$tool-$op.status"
    ) &
  done
  wait
  for tool in memcheck racecheck initcheck synccheck; do
    name="$tool-$op" log="$OUT/sanitizer-$tool-$op.txt" lines=20
    read -r status seconds <"$OUT/sanitizer-$tool-$op.status"
    rm "$OUT/sanitizer-$tool-$op.status"
    verdict[$name]="FAILED"
    if [ "$status" = 124 ]; then verdict[$name]="TIMED OUT after $limit s"; fi
    if [ "$status" = 0 ]; then verdict[$name]="ok" lines=2; fi
    verdict[$name]+=" ($seconds s)"
    steps+=("$name")
    echo "== $name"
    tail -n "$lines" "$log"
  done
}

step report 30 "$PYTHON" -m fused_ops
# Several at a time where pytest-xdist is there: most of a test is the reference on the host.
workers=()
if "$PYTHON" -c 'import xdist' 2>/dev/null; then workers=(-n 6 --dist worksteal); fi
step tests 280 "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests --show-capture=no \
  "${workers[@]}" --junitxml="$OUT/gpu-tests.xml"
step kernels 30 "$PYTHON" -m benchmarks.sanitizer_cases --kernels
for op in matmul triangle attention points; do
  sanitize $op 150
done
# A job that has begun is finished: 25 seconds for the last one and the start.
limit=$(left 175)
step benchmark "$limit" "$PYTHON" -m benchmarks --device cuda --output "$OUT/gpu.json" \
  --budget $((limit > 35 ? limit - 25 : 10))

verdicts=()
for name in "${steps[@]}"; do
  verdicts+=("$name=${verdict[$name]}")
done
"$PYTHON" -m benchmarks.round_summary "$OUT" "${verdicts[@]}"
