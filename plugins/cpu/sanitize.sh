#!/usr/bin/env bash
# The native kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer: builds the library
# with both, runs their tests, builds it again without. From the repository's root.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
trap '"$python" -m polyattn_cpu.native.build' EXIT
CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment" \
    "$python" -m polyattn_cpu.native.build
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    "$python" -m pytest -p no:cacheprovider -q -n 0 tests/test_native.py tests/test_native_scan.py "$@"
