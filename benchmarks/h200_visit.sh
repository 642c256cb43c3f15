#!/usr/bin/env bash
# One visit to a bare GPU machine: libraries compile side by side while the kit runs, then uneven steps are timed.
# Usage, from the repository's root: benchmarks/h200_visit.sh OUT [BACKEND ...]
out=$1
shift
. benchmarks/h200_setup.sh || exit
cd benchmarks || exit
for step in "decode, 24 of azure" "prefill 7k" "MLA, 24 of azure" "512 new after 8k"; do
  python3 h200_ragged.py --steps "$step" > "$out/warm-${step// /_}.log" 2>&1 &
done
BACKENDS="$*" WORKERS=${WORKERS:-8} bash h200_conformance.sh "$out" &
wait
python3 h200_ragged.py --out "$out/ragged.json" > "$out/ragged.log" 2>&1
tail -45 "$out/ragged.log"
