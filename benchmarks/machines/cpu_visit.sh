#!/usr/bin/env bash
# The native CPU kernels on a machine where nothing of polyattn is installed: builds them from the sources, compares each
# instruction set with float64, times every bar. Usage, from the repository's root: benchmarks/machines/cpu_visit.sh OUT [SECONDS A CASE]
out=$1
. benchmarks/machines/cpu_setup.sh
cd benchmarks || exit
timeout 400 python3 cpu_bars.py --seconds "${2:-2}" --out "$out/cpu_bars.json" 2>&1 | tee "$out/cpu_bars.log"
cd "$root" || exit
# Correctness once the clock has stopped, on as many cores as there are.
OMP_NUM_THREADS=1 timeout 120 python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n 8 tests/plugins/cpu/test_native.py tests/plugins/cpu/test_native_bytes.py tests/plugins/cpu/test_native_scan.py 2>&1 | tail -15 | tee "$out/cpu_tests.log"
