#!/usr/bin/env bash
# Everything that a new timing table needs, and what it is judged by, in one call of about 300 s on one H200:
#
#     benchmarks/h200_choice.sh OUT [SECONDS]        # from the repository's root, after `. benchmarks/h200_setup.sh`
#
# Uneven steps beside the libraries and the host's time for a plan (ragged.json), other ways to merge parts
# (tries.log), then a table fitted anew and judged on other models (timings.json, selector.json; `h200_tune.sh`).
# SECONDS: of tuning, and as much again of judging, unless JUDGE_GPU names a second GPU for that. Called again
# with the same OUT it goes on where it ended. RAGGED and TRIES are the seconds of the first two parts.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
seconds=${2:-100}
(
  cd benchmarks || exit
  timeout $((${RAGGED:-70} + 40)) python3 h200_ragged.py --seconds "${RAGGED:-70}" --out "$out/ragged.json" --steps "1 x 128k" "the same in 64 equal" \
    "of mooncake" "of azure" "16 new after 128k" "64 x 4 new" "40 decodes" > "$out/ragged.log" 2>&1
  timeout $((${TRIES:-30} + 30)) python3 h200_ragged_tries.py --merging --seconds "${TRIES:-30}" > "$out/tries.log" 2>&1
)
tail -30 "$out/ragged.log"
cat "$out/tries.log"
# The judging points' lengths are of a seed of their own, and the day's: nothing was fitted to them.
JUDGE_SEED=${JUDGE_SEED:-61127} timeout $((2 * seconds + 90)) bash benchmarks/h200_tune.sh "$out" "$seconds"
