#!/usr/bin/env bash
# Fits a timing table on this GPU and judges the choices by it on other models, lengths and seeds: about three
# minutes on two GPUs, five on one. From the repository's root, after `. benchmarks/machines/h200_setup.sh`:
#
#     benchmarks/machines/h200_tune.sh OUT [SECONDS]
#
# JUDGE_GPU names a second GPU, on which the judging points are measured meanwhile; JUDGE_SEED draws their
# lengths, of a seed that nothing was fitted to or chosen by, JUDGE_MODELS which models (names of
# benchmarks/selector.py, ";" between them). OUT gets timings.json (the table),
# timings.points.jsonl (what it was fitted to), selector.json (the points that judge it) and logs. Called again
# with what OUT held before, it goes on: no point is measured twice. FLASHINFER compiles minutes for each new
# variant: everything here is plain causal bfloat16 with heads of 128.
set -u
out=$1
seconds=${2:-170}
names=${BACKENDS:-TRITON_ATTN FLASH_ATTN_V3 FLASHINFER}
device=${DEVICE:-cuda}
seed=${JUDGE_SEED:-31115}
mkdir -p "$out"
export OMP_NUM_THREADS=4
models=()
# Query heads, KV heads: none of them among those of benchmarks/selector.py.
for heads in ${FIT:-32,8 64,8 32,32 16,1 48,4 8,2}; do
  folder=$out/fit/$heads
  mkdir -p "$folder"
  printf '{"model_type": "llama", "num_attention_heads": %s, "num_key_value_heads": %s, "head_dim": 128, "hidden_size": %s, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}\n' \
    "${heads%,*}" "${heads#*,}" "$((${heads%,*} * 128))" > "$folder/config.json"
  models+=(--model "$folder")
done
backends=()
for name in $names; do backends+=(--backend "$name"); done

judged=()
if [ -n "${JUDGE_MODELS:-}" ]; then
  IFS=';' read -ra judged <<< "$JUDGE_MODELS"
  judged=(--models "${judged[@]}")
fi

judge() {
  CUDA_VISIBLE_DEVICES=${JUDGE_GPU:-${CUDA_VISIBLE_DEVICES:-0}} python3 benchmarks/selector.py --device "$device" \
    --seed "$seed" --out "$out/selector.json" --seconds "$seconds" --backends $names \
    "${judged[@]}" > "$out/judge.log" 2>&1
}
[ -n "${JUDGE_GPU:-}" ] && judge &
python3 -m polyattn tune --device "$device" --out "$out/timings.json" --seconds "$seconds" \
  "${models[@]}" "${backends[@]}" > "$out/tune.log" 2>&1
tail -45 "$out/tune.log"
wait
[ -n "${JUDGE_GPU:-}" ] || judge
tail -3 "$out/judge.log"
python3 benchmarks/selector.py --device "$device" --table "$out/timings.json" --out "$out/selector.json" --seconds 0 \
  --seed "$seed" --backends $names > "$out/selector.log" 2>&1
tail -45 "$out/selector.log"
