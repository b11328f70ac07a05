#!/usr/bin/env bash
# Everything to check and measure on one NVIDIA H200 with nothing but its image (torch, triton, nvcc, ninja), in 8 minutes at most
# ($BUDGET seconds); SMALL=1 rehearses it on a CPU. In $OUT: device.jsonl (the results), table.txt, grpo-metrics.jsonl, errors.txt.
# grpo and most rivals (liger-kernel, quack-kernels with nvidia-cutlass-dsl) need packages that the image lacks and say which: their wheels
# are installed from $WHEELS if that folder exists.
set -u
cd "$(dirname "$0")/../.."
export SMALL="${SMALL:-0}" OUT="${OUT:-/tmp/fastsched-device}" PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
PYTHON="${PYTHON:-python3}"
FACTOR=1
unset TRITON_INTERPRET
if [ "$SMALL" = 1 ]; then
  export TRITON_INTERPRET=1
  FACTOR=4
fi
BUDGET="${BUDGET:-$((480 * FACTOR))}"
SCRATCH=$(mktemp -d)
export SCRATCH LIMIT
trap 'rm -rf "$SCRATCH"' EXIT
mkdir -p "$OUT"
rm -f "$OUT"/{device.jsonl,table.txt,grpo-metrics.jsonl,errors.txt}

say() {  # part, note: a row of a part that says nothing itself
  printf '{"part": "%s", "what": "the part as a whole", "note": "%s"}\n' "$1" "$2" >>"$OUT/device.jsonl"
}
last_line() {  # part: what its error output ended with, fit for JSON
  grep -v '^[[:space:]]*$' "$SCRATCH/$1.err" | tail -n 1 | LC_ALL=C tr -cd '[:print:]' | tr -d '"\\' | cut -c 1-100
}
timed() {  # part, most seconds, command: its error output ends up in errors.txt
  local name=$1 code
  LIMIT=$(($2 * FACTOR))
  [ $((BUDGET - SECONDS)) -lt "$LIMIT" ] && LIMIT=$((BUDGET - SECONDS))
  shift 2
  echo "== $name"
  if [ "$LIMIT" -lt 10 ]; then
    say "$name" "not begun: out of time"
    return 1
  fi
  timeout --kill-after=5 "$LIMIT" "$@" 2>"$SCRATCH/$name.err"
  code=$?
  if [ -s "$SCRATCH/$name.err" ]; then { echo "== $name"; tail -n 100 "$SCRATCH/$name.err"; } >>"$OUT/errors.txt"; fi
  [ $code -eq 0 ] && return 0
  tail -n 5 "$SCRATCH/$name.err"
  case $code in 124 | 137) say "$name" "ended with code $code, out of time" ;; *) say "$name" "ended with code $code: $(last_line "$name")" ;; esac
  return $code
}
part() { timed "$1" "$2" "$PYTHON" -m bench.device.head "$1"; }
build() {
  TORCH_CUDA_ARCH_LIST=9.0 timed build 150 bash -c '"$0" setup.py build_ext --inplace >&2' "$PYTHON" &&
    say build "compiled ops are up to date after $SECONDS s"
}

if [ -n "${WHEELS:-}" ] && [ -d "$WHEELS" ]; then
  timed wheels 60 "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$SCRATCH/site" "$WHEELS"/*.whl
  export PYTHONPATH="$PYTHONPATH:$SCRATCH/site"
fi
build &  # while the Triton kernels are checked, which need no other
part kernels 110
wait
part peaked 50
part head_check 60
part head 60
part published 30
for rival in eager compiled liger_grpo liger_ce liger_scaled quack; do part $rival 45; done
part head_odd 30
part compilations 25
part averaging 30
unset TRITON_INTERPRET
part grpo 120
"$PYTHON" -m bench.device.head table | tee "$OUT/table.txt"
