#!/usr/bin/env bash
# Fits a timing table on this GPU and judges the choices by it on other models, lengths and seeds: about three
# minutes on two GPUs, five on one. From the repository's root, after `. benchmarks/machines/h200_setup.sh`:
#
#     benchmarks/machines/h200_tune.sh OUT [SECONDS]
#
# JUDGE_GPU names a second GPU, on which the judging rows (the suite `choice`) are measured meanwhile, JUDGE_ROWS
# which of them: FLASHINFER compiles minutes for each new variant, so heads of 128 in bfloat16 where nothing is said.
# MACHINE (h100 or h200) says whose profile chooses. OUT gets timings.json (the table), timings.points.jsonl (what
# it was fitted to), $MACHINE.jsonl (the rows that judge it), $MACHINE.md (what the choices cost) and logs.
set -u
out=$1
seconds=${2:-170}
names=${BACKENDS:-TRITON_ATTN FLASH_ATTN_V3 FLASHINFER}
device=${DEVICE:-cuda}
machine=${MACHINE:-h200}
mkdir -p "$out"
export OMP_NUM_THREADS=4
models=()
# Query heads, KV heads: none of them among those of benchmarks/suites/choice.py.
for heads in ${FIT:-32,8 64,8 32,32 16,1 48,4 8,2}; do
  folder=$out/fit/$heads
  mkdir -p "$folder"
  printf '{"model_type": "llama", "num_attention_heads": %s, "num_key_value_heads": %s, "head_dim": 128, "hidden_size": %s, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}\n' \
    "${heads%,*}" "${heads#*,}" "$((${heads%,*} * 128))" > "$folder/config.json"
  models+=(--model "$folder")
done
backends=()
for name in $names; do backends+=(--backend "$name"); done

judge() {
  CUDA_VISIBLE_DEVICES=${JUDGE_GPU:-${CUDA_VISIBLE_DEVICES:-0}} python3 benchmarks/run.py choice --device "$device" \
    --rows "${JUDGE_ROWS:-of 128: }" --seconds "$seconds" --out "$out/$machine.jsonl" > "$out/judge.log" 2>&1
}
[ -n "${JUDGE_GPU:-}" ] && judge &
python3 -m polyattn tune --device "$device" --out "$out/timings.json" --seconds "$seconds" \
  "${models[@]}" "${backends[@]}" > "$out/tune.log" 2>&1
tail -45 "$out/tune.log"
wait
[ -n "${JUDGE_GPU:-}" ] || judge
tail -3 "$out/judge.log"
POLYATTN_TIMINGS="$out/timings.json" python3 benchmarks/run.py --pages "$out"
sed -n '/^## What choosing costs/,$p' "$out/$machine.md"
