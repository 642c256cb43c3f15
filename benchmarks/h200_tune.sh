#!/usr/bin/env bash
# Measures the backends of this GPU, fits a timing table and judges the choices by it: one visit of
# about six minutes. From the repository's root, after `. benchmarks/h200_setup.sh`:
#
#     benchmarks/h200_tune.sh OUT [SECONDS]
#
# OUT gets timings.json (the table), timings.points.jsonl (what it was fitted to), selector.json and
# two logs. Called again with what OUT held before, it goes on: no point is measured twice.
# FLASHINFER compiles minutes for each new variant: everything here is plain causal bfloat16 (and
# e4m3 caches, where FP8=1), heads of 64 and 128.
set -u
out=$1
seconds=${2:-210}
mkdir -p "$out"
export OMP_NUM_THREADS=4
backends=()
for name in ${BACKENDS:-TRITON_ATTN FLASH_ATTN_V3 FLASHINFER FLASHINFER_TRTLLM FLASH_ATTN FLASH_ATTN_V4 CUDNN_ATTENTION}; do
  backends+=(--backend "$name")
done
layers=()
[ -n "${FP8:-}" ] || layers+=(--no-quantized)
python3 -m polyattn tune --device cuda --out "$out/timings.json" --seconds "$seconds" \
  "${layers[@]}" "${backends[@]}" > "$out/tune.log" 2>&1
tail -45 "$out/tune.log"
python3 benchmarks/selector.py --device cuda --table "$out/timings.json" --out "$out/selector.json" \
  --backends ${BACKENDS:-TRITON_ATTN FLASH_ATTN_V3 FLASHINFER FLASHINFER_TRTLLM FLASH_ATTN FLASH_ATTN_V4 CUDNN_ATTENTION} \
  > "$out/selector.log" 2>&1
tail -45 "$out/selector.log"
