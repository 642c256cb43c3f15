#!/usr/bin/env bash
# The native kernels under AddressSanitizer and UndefinedBehaviorSanitizer: builds a library with both, in a
# copy of the plugin, and runs with it the kernels' tests and the conformance kit of each native backend, by
# each instruction set that is here. Usage: plugins/cpu/sanitize.sh [pytest's arguments]
# PARTS and ISAS choose some, and what is built; in FOLDER the build stays for the next call, and each kit's report with it.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=${FOLDER:-$(mktemp -d)}
[ -n "${FOLDER:-}" ] || trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/site/polyattn_cpu"
tar -c -C plugins/cpu/src/polyattn_cpu --exclude=kernels.lib --exclude=build.txt --exclude=__pycache__ . |
    tar -x -C "$folder/site/polyattn_cpu"
export PYTHONPATH=$folder/site${PYTHONPATH:+:$PYTHONPATH}
CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment" \
    "$python" - ${ISAS:-} << 'END'
import sys
from polyattn_cpu.native import build
chosen = {*sys.argv[1:]} | {build.BASES[name] for name in sys.argv[1:] if name in build.BASES}
here = build.machine()
build.ISAS[here] = {n: flags for n, flags in build.ISAS[here].items() if not chosen or n in chosen}
raise SystemExit(not build.build_or_say())
END
# What they find goes to the standard error, which pytest would keep to itself and lose at their exit.
options=(-p no:cacheprovider --capture=sys -q -n 0)
# GCC 13 keeps locals on stacks of the sanitizer's own (github.com/google/sanitizers/issues/1735), where stores of 64 bytes
# aren't aligned; GCC 12 doesn't.
sanitized() {
    LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libubsan.so)" \
        ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1 "$python" "$@"
}
isas=${ISAS:-$(sanitized -c "from polyattn_cpu.native import library; print(*library.isas())")}
for part in ${PARTS:-tests NATIVE_ATTN NATIVE_MLA NATIVE_STORE NATIVE_SCAN NATIVE_INDEX}; do
    if [ "$part" = tests ]; then
        echo "== tests"
        sanitized -m pytest "${options[@]}" tests/plugins/cpu/test_native.py \
            tests/plugins/cpu/test_native_{bytes,index,rows,scan,threads}.py "$@"
        continue
    fi
    for isa in $isas; do
        echo "== $part by $isa"
        POLYATTN_CPU_ISA=$isa sanitized -m pytest "${options[@]}" --pyargs polyattn.conformance \
            --polyattn-backend "$part" --polyattn-device cpu --polyattn-report "$folder/$isa-$part.json" "$@"
    done
done
