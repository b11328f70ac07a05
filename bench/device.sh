#!/usr/bin/env bash
# Everything to measure on one NVIDIA H200 with nothing but its image, in at most 8 minutes; SMALL=1 rehearses it on a CPU.
# Wheels (deepspeed, liger-kernel, jsonargparse, ...) are installed from $WHEELS if that folder exists. Results: $OUT/device.jsonl.
set -u
cd "$(dirname "$0")/.."
export SMALL="${SMALL:-0}" OUT="${OUT:-/tmp/fastsched-device}" PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
PYTHON="${PYTHON:-python}"
mkdir -p "$OUT"
rm -f "$OUT"/device.jsonl
if [ -n "${WHEELS:-}" ] && [ -d "$WHEELS" ]; then
  $PYTHON -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl || echo "some wheels did not install"
fi
part() {  # name, seconds
  echo "== $1"
  timeout --kill-after=5 "$2" "$PYTHON" -m bench.device "$1" 2>"$OUT/$1.err"
  code=$?
  if [ $code -ne 0 ]; then
    tail -n 5 "$OUT/$1.err"
    "$PYTHON" -m bench.device failed "$1" "$code"
  fi
}
if [ "$SMALL" = 1 ]; then export TRITON_INTERPRET=1; fi
part kernels 90
part head 120
part head_odd 60
part compilations 40
part averaging 30
unset TRITON_INTERPRET
part grpo 140
"$PYTHON" -m bench.device table
