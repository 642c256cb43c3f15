#!/usr/bin/env bash
# All that is measured of uneven steps, in one visit of two GPUs: `warm` compiles FlashInfer's modules (plain
# causal bfloat16, heads of 128: prefill fa2 and fa3, decode, MLA, BatchAttention), `all` measures.
# From the repository's root, after `. benchmarks/h200_setup.sh`: benchmarks/h200_uneven.sh warm|all OUT [SECONDS]
set -u
what=$1
out=$2
seconds=${3:-170}
mkdir -p "$out"
first=${FIRST_GPU:-0}
second=${SECOND_GPU:-1}
if [ "$what" = warm ]; then
  # Whose steps run otherwise since: one call for a mixed step, other cuts.
  BACKENDS="${KITS:-FLASH_ATTN_V3 TRITON_ATTN}" CUDA_VISIBLE_DEVICES=$first timeout 420 bash benchmarks/h200_conformance.sh "$out" > "$out/kits.log" 2>&1 &
  cd benchmarks || exit
  for step in "decode, 24 of azure" "prefill 7k" "MLA, 24 of azure" "512 new after 8k" "16/16 heads: 40"; do
    name=${step//[ \/:]/_}
    CUDA_VISIBLE_DEVICES=$first timeout 420 python3 h200_ragged.py --steps "$step" > "$out/warm-$name.log" 2>&1 &
  done
  CUDA_VISIBLE_DEVICES=$second timeout 420 python3 h200_mixed.py --warm > "$out/warm-mixed.log" 2>&1 &
  CUDA_VISIBLE_DEVICES=$second timeout 420 python3 h200_flashinfer_sizes.py > "$out/sizes.log" 2>&1 &
  # Which schedules are faster: these need no compiler of FlashInfer's.
  CUDA_VISIBLE_DEVICES=${THIRD_GPU:-$second} timeout 150 python3 h200_ragged_tries.py --seconds 130 > "$out/tries.log" 2>&1 &
  wait
  exit 0
fi
CUDA_VISIBLE_DEVICES=$first JUDGE_GPU=$second timeout $((seconds + 60)) bash benchmarks/h200_tune.sh "$out" "$seconds"
cd benchmarks || exit
CUDA_VISIBLE_DEVICES=$second timeout 90 python3 h200_mixed.py --seconds 70 --out "$out/mixed.json" > "$out/mixed.log" 2>&1 &
CUDA_VISIBLE_DEVICES=$first timeout 200 python3 h200_ragged.py --out "$out/ragged.json" > "$out/ragged.log" 2>&1
wait
tail -45 "$out/ragged.log"
tail -90 "$out/mixed.log"
