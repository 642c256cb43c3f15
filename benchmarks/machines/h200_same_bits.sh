#!/usr/bin/env bash
# Does TRITON_ATTN give the bits that it claims to, and at what cost? One GPU of Hopper's generation, from the
# repository's root:
#
#     benchmarks/machines/h200_same_bits.sh OUT MACHINE COMMIT SECONDS      # MACHINE: h100 or h200
#
# Runs the kit's cases of the levels of `batch_invariant`, then the suite `same_bits`, which adds to OUT/MACHINE.jsonl; ends with the
# suite's ratios, its worst rows and their geometric mean.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd) machine=$2 commit=$3
end=$((SECONDS + $4))
python3 -c "import polyattn" 2> /dev/null || . benchmarks/machines/sources.sh
export OMP_NUM_THREADS=1
root=$PWD
(cd /tmp && timeout -s INT -k 15 $(($4 / 2)) python3 -m pytest -q -p no:cacheprovider --pyargs polyattn.conformance \
  --polyattn-backend TRITON_ATTN --polyattn-report "$out/same_bits.json" -n 8 \
  -k "(regrouped- or chunked- or drafted- or hits- or given_alike-) and not numeric and not pair and not search" \
  > "$out/same_bits_kit.log" 2>&1)
grep -aE "^FAILED|conformance of|error" "$out/same_bits_kit.log" | cut -c1-200 | tail -20
cd "$root" || exit
export OMP_NUM_THREADS=4
timeout -k 5 $((end - SECONDS)) python3 benchmarks/run.py same_bits --device cuda --seconds $((end - SECONDS - 20)) \
  --out "$out/$machine.jsonl" --commit "$commit" > "$out/same_bits.log" 2>&1
grep -E "wrong|cannot|Error" "$out/same_bits.log" | cut -c1-190 | head -12
python3 - "$out/$machine.jsonl" << 'PYTHON'
import json, math, sys
us = {}
for line in open(sys.argv[1]):
    one = json.loads(line)
    if one.get("suite") == "same_bits" and "us" in one:
        us.setdefault(one["row"], {})[one["who"]] = one["us"]
for level in ("batch_invariant", "call_invariant"):
    ratios = {row: who[level] / who["free"] for row, who in us.items() if {level, "free"} <= set(who)}
    print(f"== {level}")
    for row, ratio in sorted(ratios.items(), key=lambda pair: -pair[1]):
        print(f"{ratio:6.3f}  {us[row][level]:9.1f} of {us[row]['free']:9.1f} us  {row}")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        print(f"{len(ratios)} rows, geometric mean {mean:.3f}")
PYTHON
