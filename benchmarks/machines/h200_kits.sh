#!/usr/bin/env bash
# Runs conformance kits on one GPU or several within a time, two side by side on each, and ends with a table.
#   . benchmarks/machines/h200_setup.sh; benchmarks/machines/h200_kits.sh OUT SECONDS [BACKEND[=SECONDS] ...]
# A kit computes its reference on the host, so cores count, not GPUs: two kits share a GPU. A kit that outlives
# its own seconds is interrupted; the table then says how far it came. What is missing for a backend is said there too.
# FLASH_ATTN: vLLM's build (.fa, or in the site already), whose PTX the driver assembles at first use, for minutes.
# FLASH_ATTN_V4: its wheels in .fb, one of them in halves, .fb/half.00 and .fc/half.01.
# Such folders lie in the repository's root, or where an earlier call has put them: KEEP, /tmp/keep.
# Begun again it goes on: cases that passed in OUT's report of the same commit and machine aren't run again. Reports of
# an earlier call whose OUT is gone are taken from EARLIER.
out=$(realpath -m "$1"); shift
end=$((SECONDS + $1)); shift
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
mkdir -p "$out"
# Seconds that each kit may take with eight workers, about twice what it took (MLA, SCAN, FLA, SDPA, XFORMERS: not timed
# alone). The longest one first, beside which the others run.
[ $# -gt 0 ] || set -- TRITON_ATTN=450 TORCH_MLA=60 XFORMERS=120 TORCH_SCAN=150 FLA=150 TORCH_SDPA=150 FLEX_ATTENTION=180 FLASH_ATTN_V4=260 FLASHINFER=300 FLASH_ATTN=420
# Which GPUs (GPUS="1"), and how many kits at a time on each (EACH).
read -r -a gpus <<< "${GPUS:-$(seq -s ' ' 0 $(($(nvidia-smi -L 2>/dev/null | grep -c . || true) - 1)))}"
[ ${#gpus[@]} -gt 0 ] || gpus=(0)
cores=$(env -u OMP_NUM_THREADS nproc)
side=$((${EACH:-2} * ${#gpus[@]})) # kits at a time
workers=${WORKERS:-$((cores / side > 0 ? cores / side : 1))}
export OMP_NUM_THREADS=1 CUDA_CACHE_MAXSIZE=4294967296 CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-/tmp/cuda_cache} CUDA_MODULE_LOADING=LAZY
left() { echo $((end - SECONDS)); }
carried() { # FILE: where it lies, nothing if nowhere
  local place
  for place in "$root" "${KEEP:-/tmp/keep}"; do [ -e "$place/$1" ] && echo "$place/$1" && return; done
}

fa2() { # puts the library in its place
  local place=${SITE:-/tmp/site}/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so packed
  packed=$(carried .fa/_vllm_fa2_C.abi3.so.xz)
  if [ ! -e "$place" ] && [ -n "$packed" ]; then
    mkdir -p "$(dirname "$place")"
    $python -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" "$packed" "$place.part" && mv "$place.part" "$place"
  fi
}

fa4() { # installs it apart from the rest
  local first second wheels=/tmp/fa4w
  first=$(carried .fb/half.00) second=$(carried .fc/half.01)
  [ -n "$first" ] && [ -n "$second" ] && [ ! -e /tmp/fa4 ] || return 0
  mkdir -p $wheels
  cp "$(dirname "$first")"/*.whl $wheels/
  cat "$first" "$second" > $wheels/nvidia_cutlass_dsl_libs_cu13-4.8.1-cp312-cp312-manylinux_2_28_x86_64.whl
  $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/fa4 $wheels/*.whl > "$out/fa4_install.out" 2>&1
}

kit() { # BACKEND SECONDS GPU
  local backend=$1 seconds=$2 path=$PYTHONPATH chosen=() began=$SECONDS
  case "$backend" in
    FLASH_ATTN) fa2 ;;
    FLASH_ATTN_V4) fa4; path=$path:/tmp/fa4:/tmp/fa4/nvidia_cutlass_dsl/dsl_packages ;;
    MAMBA_SSM | FLA | FLASHINFER*) chosen=(-k "not search") ;; # compiled or tuned anew for each drawn shape
  esac
  [ "$(left)" -lt "$seconds" ] && seconds=$(left)
  local report=$out/conformance-$backend.json earlier=${EARLIER:-$out}/conformance-$backend.json
  [ -e "$report" ] || [ ! -e "$earlier" ] || cp "$earlier" "$report"
  if [ "$seconds" -lt 10 ]; then echo "not begun: no time was left" > "$out/$backend.log"; else
    (cd /tmp && CUDA_VISIBLE_DEVICES=$3 PYTHONPATH=$path timeout -s INT -k 15 "$seconds" $python -m pytest -q -p no:cacheprovider -p no:benchmark --pyargs polyattn.conformance \
      --polyattn-backend "$backend" --polyattn-report "$report" --polyattn-resume -n "$workers" "${chosen[@]}" ${ARGS:-} > "$out/$backend.log" 2>&1)
  fi
  echo "$backend $((SECONDS - began))" >> "$out/kits.seconds"
}

queue=$out/kits.queue
printf '%s\n' "$@" > "$queue"
: > "$out/kits.seconds"
for ((slot = 0; slot < side; slot++)); do
  while next=$(flock "$queue.lock" sh -c 'head -1 "$0"; sed -i 1d "$0"' "$queue") && [ -n "$next" ]; do
    seconds=${next#*=}
    kit "${next%%=*}" "$([ "$seconds" = "$next" ] && echo 300 || echo "$seconds")" "${gpus[slot % ${#gpus[@]}]}"
  done &
done
wait
echo "${#gpus[@]} GPUs, $cores cores, $workers workers a kit"
while read -r backend seconds; do
  said=$(grep -aE "conformance of|ERROR: |not begun" "$out/$backend.log" | tail -1 | cut -c1-130)
  [ -n "$said" ] || said="interrupted, passed (.) and failed (F): $(grep -aE '^[.FEsx]+( |$)' "$out/$backend.log" | grep -aoE '[.FE]' | sort | uniq -c | tr -s ' \n' ' ')"
  printf '%-16s %4s s  %s\n' "$backend" "$seconds" "$said"
  grep -aE "^FAILED" "$out/$backend.log" | cut -c1-150 | head -12
done < "$out/kits.seconds"
