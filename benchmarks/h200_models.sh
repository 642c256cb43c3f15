#!/usr/bin/env bash
# Models on a machine of several GPUs: the whole field fuzz on its processors; whole models in bfloat16 on all
# GPUs but the last, on which the rotating store and the chunked scans are timed.
# Usage, from the repository's root: benchmarks/h200_models.sh OUT [GPUS]; transformers' wheel in ./.hf;
# MODELS="gemma2 mamba2" for some shapes alone.
out=$1 last=$((${2:-4} - 1))
. benchmarks/h200_setup.sh || exit
python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/hf .hf/*.whl || exit
export HF_HUB_OFFLINE=1 PYTHONPATH=/tmp/hf:$PWD/core/src:$PWD/plugins/triton/src:$PWD/plugins/cuda/src:$PYTHONPATH
OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout 420 python3 -m pytest -q \
  -p xdist.plugin -n "${WORKERS:-40}" -m sweep -rP -o filterwarnings= tests/spec/test_transformers.py \
  > "$out/fuzz.log" 2>&1 &
cd benchmarks || exit
CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((last - 1))) timeout 400 python3 h200_models.py --spread --seconds 380 \
  ${MODELS:+--models $MODELS} --out "$out/models" > "$out/models.log" 2>&1 &
export CUDA_VISIBLE_DEVICES=$last
timeout 110 python3 h200_store.py --seconds 90 --out "$out/store.json" > "$out/store.log" 2>&1
timeout 130 python3 h200_scan.py --kinds kda rwkv7 --seconds 110 --out "$out/scan.json" > "$out/scan.log" 2>&1
wait
cut -c1-330 "$out/store.log" | tail -25
tail -30 "$out/scan.log"
tail -12 "$out/models.log"
grep -E "^(FAILED|ERROR|E  )" "$out/fuzz.log" | head -20
tail -2 "$out/fuzz.log"
