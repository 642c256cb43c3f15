#!/usr/bin/env bash
# Our CUDA kernels under compute-sanitizer (CUDA's toolkit): a few of each backend's cases by each tool.
#   . benchmarks/machines/h200_setup.sh; benchmarks/machines/h200_sanitize.sh OUT SECONDS [BACKEND ...]
# TOOLS and CASES (pytest's -k) choose others; OPTIONS go to compute-sanitizer (`--kernel-name kns=decode`).
# A row for each: how many errors, and what pytest says; the whole text is in OUT. What ran stays for the next
# call. Not run on a GPU yet.
out=$(realpath -m "$1"); end=$((SECONDS + $2)); shift 2
[ $# -gt 0 ] || set -- TRITON_ATTN TRITON_MLA TRITON_MLA_SPARSE TRITON_SCAN TRITON_TOKEN_SCAN TRITON_STORE TRITON_MERGE
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")}
[ -x "$sanitizer" ] || { echo "no compute-sanitizer: install CUDA's toolkit, or name it in SANITIZER" >&2; exit 2; }
mkdir -p "$out"
# Tensors lie in allocations of their own: else what is behind one is another one's memory.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
wrong=0
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  for backend in "$@"; do
    log=$out/$tool-$backend.log left=$((end - SECONDS))
    if ! grep -aqs "SUMMARY" "$log"; then
      [ "$left" -gt 10 ] || { echo "$tool $backend: not begun, no time was left"; continue; }
      (cd /tmp && timeout -s INT -k 15 "$left" "$sanitizer" --tool "$tool" --error-exitcode 9 --target-processes all ${OPTIONS:-} \
        "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider --pyargs polyattn.conformance --polyattn-backend "$backend" --polyattn-seed 0 \
        --polyattn-budget 1 -k "${CASES:-gqa_3 or feature_lse or feature_sliding_window or plans}" > "$log" 2>&1)
    fi
    summary=$(grep -a "SUMMARY" "$log" | sed 's/=* *//' | sort -u | tr '\n' ' ') # racecheck has one of its own
    grep -aq "SUMMARY: 0 " "$log" && ! grep -aqE "SUMMARY: [1-9]| failed" "$log" || wrong=1
    echo "$tool $backend: ${summary:-interrupted}$(grep -aE "passed|failed" "$log" | tail -1)"
  done
done
exit $wrong
