#!/usr/bin/env bash
# The conformance kit of the native backends on an emulated Arm processor: Debian's Python and torch's wheel for
# aarch64 under qemu-user, the kernels cross-built. One core; a kit takes half a minute (NATIVE_STORE) to nine minutes
# (NATIVE_SCAN by SVE), torch's import 20 seconds of it; `--polyattn-budget 1` shortens the searches.
# Usage, from the repository's root: benchmarks/machines/cpu_arm.sh OUT [pytest's arguments]. BACKENDS and ISAS choose some;
# OUT keeps the root, the build, and each kit's report. Needs apt's g++-aarch64-linux-gnu and qemu-user, and pip.
set -euo pipefail
mkdir -p "$1"
out=$(realpath "$1") python=${PYTHON:-.venv/bin/python}
shift
if [ ! -d "$out/root" ]; then
    mkdir -p "$out"/{state,cache/archives,lists}/partial "$out/debs"
    touch "$out/status"
    grep -m1 -hE '^deb .*deb.debian.org/debian ' /etc/apt/sources.list 2> /dev/null > "$out/sources.list" ||
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" > "$out/sources.list"
    cat > "$out/apt.conf" << END
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
Dir::State "$out/state";
Dir::State::lists "$out/lists";
Dir::State::status "$out/status";
Dir::Cache "$out/cache";
Dir::Etc::sourcelist "$out/sources.list";
Dir::Etc::sourceparts "-";
END
    APT_CONFIG=$out/apt.conf apt-get -qq update
    (cd "$out/debs" && APT_CONFIG=$out/apt.conf apt-get -qq download python3.11-minimal libpython3.11-minimal \
        libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 libgomp1 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 \
        libsqlite3-0 libuuid1 libcrypt1)
    for package in "$out"/debs/*.deb; do dpkg -x "$package" "$out/root"; done
fi
if [ ! -d "$out/site/torch" ]; then
    # torch 2.10: the last whose wheel for aarch64 on PyPI holds no CUDA. What it needs is named, as pip takes
    # the markers for this machine's.
    wheels=("$python" -m pip install -q --target "$out/site" --only-binary=:all: --python-version 311 --implementation cp
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64)
    "${wheels[@]}" --no-deps torch==2.10.0
    "${wheels[@]}" filelock typing-extensions sympy networkx jinja2 fsspec numpy packaging pluggy pytest hypothesis
fi
mkdir -p "$out/polyattn"
for package in core/src/polyattn plugins/cpu/src/polyattn_cpu; do
    tar -c -C "$(dirname $package)" --exclude=kernels.lib --exclude=build.txt --exclude=__pycache__ "$(basename $package)" |
        tar -x -C "$out/polyattn"
done
"$python" - "$out/polyattn" << 'END'
import importlib.metadata, shutil, sys
for name in ("polyattn", "polyattn-cpu"):
    folder = importlib.metadata.distribution(name)._path
    shutil.copytree(folder, f"{sys.argv[1]}/{folder.name}", dirs_exist_ok=True)
END
CXX=aarch64-linux-gnu-g++ TARGET_MACHINE=aarch64 PYTHONPATH=$out/polyattn "$python" -c \
    "from polyattn_cpu.native import build; raise SystemExit(not build.build_or_say())"
export QEMU_CPU=max,sve-default-vector-length=32 OMP_NUM_THREADS=1 POLYATTN_PROBE_TIMEOUT=60 POLYATTN_PLUGIN_TIMEOUT=300
for isa in ${ISAS:-sve256_bf16 neon_bf16 sve256 neon}; do
    for backend in ${BACKENDS:-NATIVE_STORE NATIVE_MLA NATIVE_INDEX NATIVE_SCAN NATIVE_ATTN}; do
        echo "== $backend by $isa, emulated"
        (cd "$out" && POLYATTN_CPU_ISA=$isa PYTHONPATH=$out/polyattn:$out/site qemu-aarch64 -L root root/usr/bin/python3.11 \
            -m pytest -q -p no:cacheprovider --pyargs polyattn.conformance --polyattn-backend "$backend" \
            --polyattn-device cpu --polyattn-report "$out/$isa-$backend.json" "$@")
    done
done
