#!/usr/bin/env bash
# Our CUDA kernels under compute-sanitizer (CUDA's toolkit): a few of each backend's cases by each tool.
#   . benchmarks/machines/h200_setup.sh; benchmarks/machines/h200_sanitize.sh OUT SECONDS [BACKEND ...]
# TOOLS and CASES (pytest's -k) choose others; SIDE of them run side by side; OPTIONS go to compute-sanitizer
# (`--kernel-name kns=decode`). A row for each: how many errors, and what pytest says; the whole text is in OUT.
# What ran stays for the next call.
out=$(realpath -m "$1"); end=$((SECONDS + $2)); shift 2
[ $# -gt 0 ] || set -- TRITON_STORE TRITON_MERGE TRITON_MLA TRITON_ATTN TRITON_TOKEN_SCAN TRITON_SCAN TRITON_MLA_SPARSE
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")}
[ -x "$sanitizer" ] || { echo "no compute-sanitizer: install CUDA's toolkit, or name it in SANITIZER" >&2; exit 2; }
mkdir -p "$out"
# Tensors lie in allocations of their own: else what is behind one is another one's memory.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1

sanitize() { # TOOL BACKEND
  local log=$out/$1-$2.log left=$((end - SECONDS))
  grep -aqs "SUMMARY" "$log" && return
  [ "$left" -gt 10 ] || { echo "not begun: no time was left" > "$log"; return; }
  (cd /tmp && timeout -s INT -k 15 "$left" "$sanitizer" --tool "$1" --error-exitcode 9 --target-processes all ${OPTIONS:-} \
    "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider -p no:benchmark --pyargs polyattn.conformance --polyattn-backend "$2" --polyattn-seed 0 \
    --polyattn-budget 1 -k "${CASES:-gqa_3-mixed or feature_lse-mixed or feature_sliding_window-mixed or plans or kv_heads_3}" > "$log" 2>&1)
}

for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  for backend in "$@"; do
    sanitize "$tool" "$backend" &
    while [ "$(jobs -rp | wc -l)" -ge "${SIDE:-4}" ]; do wait -n; done
  done
done
wait
wrong=0
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  for backend in "$@"; do
    log=$out/$tool-$backend.log
    summary=$(grep -a "SUMMARY\|not begun" "$log" | sed 's/=* *//' | sort -u | tr '\n' ' ') # racecheck has one of its own
    grep -aq "SUMMARY: 0 " "$log" && ! grep -aqE "SUMMARY: [1-9]| failed" "$log" || wrong=1
    echo "$tool $backend: ${summary:-interrupted}$(grep -aE "passed|failed" "$log" | tail -1)"
  done
done
exit $wrong
