#!/usr/bin/env bash
# Every suite on one GPU of Hopper's generation (H100, H200), in one call of at most nine minutes. From the repository's
# root, with the commit that is measured, since a copy of the tree may have no history:
#
#     benchmarks/machines/h200.sh OUT MACHINE COMMIT        # MACHINE: h100 or h200
#
# Adds to OUT/MACHINE.jsonl, and prints into OUT/suites.log. Append the former to benchmarks/results/MACHINE.jsonl, then
# write the pages (`run.py --pages`). What is installed here is measured: on a bare machine torch and Triton; with
# `. benchmarks/machines/h200_setup.sh` before it, libraries whose wheels were carried along. SUITES names some.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd) machine=$2 commit=$3
python3 -c "import polyattn" 2> /dev/null || . benchmarks/machines/sources.sh
export OMP_NUM_THREADS=4
# Each suite's seconds, after which it begins no row; it is ended 20 s later. The rows that have bars come first.
declare -A seconds=([decode]=85 [prefill]=85 [mixed]=35 [mla]=45 [recurrent]=75 [prefix]=45 [eight_bit]=50 [graphs]=25 [store]=25 [host]=25 [same_bits]=200)
end=$((SECONDS + 525)) log=$(mktemp)
for suite in ${SUITES:-host store graphs decode prefill prefix mla eight_bit mixed recurrent}; do
  left=$((end - SECONDS)) most=${seconds[$suite]}
  [ "$most" -gt "$left" ] && most=$left
  [ "$most" -lt 5 ] && { echo "$suite: no time was left"; continue; }
  timeout -k 5 $((most + 20 < left ? most + 20 : left)) python3 benchmarks/run.py "$suite" --device cuda --seconds "$most" \
    --out "$out/$machine.jsonl" --commit "$commit" > "$log" 2>&1
  echo "== $suite: exit $?, $(grep -c ' us ' "$log") figures, bars missed: $(grep -c ': missed' "$log")"
  cat "$log" >> "$out/suites.log"
  grep -E ': missed|it is wrong|Error' "$log" | grep -v "ModuleNotFound\|SelectionError\|ImportError" | cut -c1-190 | head -12
done
wc -l "$out/$machine.jsonl"
