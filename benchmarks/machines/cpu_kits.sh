#!/usr/bin/env bash
# The conformance kit of each native backend by each instruction set that this processor has, then the kernels' tests
# under AddressSanitizer and UndefinedBehaviorSanitizer, on a machine where nothing of polyattn is installed. Usage, from
# the repository's root: benchmarks/machines/cpu_kits.sh OUT [WORKERS]. BACKENDS and ISAS choose some; OUT gets a report of each.
out=$1 workers=${2:-30}
mkdir -p "$out"
. benchmarks/machines/cpu_setup.sh
export OMP_NUM_THREADS=1
for isa in ${ISAS:-$(python3 -c 'from polyattn_cpu.native.library import isas; print(*isas())')}; do
  for backend in ${BACKENDS:-NATIVE_ATTN NATIVE_MLA NATIVE_STORE NATIVE_SCAN NATIVE_INDEX}; do
    name=$isa-$backend
    (cd /tmp && POLYATTN_CPU_ISA=$isa timeout 200 python3 -m pytest -q -p no:cacheprovider -n "$workers" --pyargs polyattn.conformance \
      --polyattn-backend "$backend" --polyattn-device cpu --polyattn-report "$out/$name.json" > "$out/$name.log" 2>&1)
    echo "$name: $(tail -1 "$out/$name.log" | cut -c1-120)" | tee -a "$out/cpu_kits.txt"
  done
done
# In a copy: the library is built there with both, and would be in everybody's way here.
copy=$(mktemp -d)
git ls-files -z 2> /dev/null | xargs -0 cp --parents -t "$copy" 2> /dev/null || cp -r . "$copy"
(cd "$copy" && PYTHONPATH=${PYTHONPATH//$root/$copy} PYTHON=python3 timeout 250 plugins/cpu/sanitize.sh -n "$workers" > "$out/sanitizers.log" 2>&1)
echo "sanitizers: $(grep -E ' passed| failed' "$out/sanitizers.log" | tail -1)" | tee -a "$out/cpu_kits.txt"
grep -m1 'model name' /proc/cpuinfo >> "$out/cpu_kits.txt"
echo; cat "$out/cpu_kits.txt"
