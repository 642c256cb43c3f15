#!/usr/bin/env bash
# Prepares a bare GPU machine without an index: source it from the repository's root. Expects the
# wheels of polyattn's distributions and of what is missing there in ./.whl, and compressed shared
# libraries (FlashAttention-3 as vLLM builds it) in ./.so.
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || return
# Packages without their compiled parts (mamba-ssm's Triton kernels) lie in ./.so/pure as they are.
[ -d .so/pure ] && cp -r .so/pure/. /tmp/site/
export PYTHONPATH=/tmp/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=16 CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
# FlashInfer's modules, compiled elsewhere by nvcc for sm_90a: NAME/NAME.so.
[ -e .aot/modules.tar.xz ] && mkdir -p /tmp/site/flashinfer/data/aot && tar xJf .aot/modules.tar.xz -C /tmp/site/flashinfer/data/aot
# FEW_MASKS=1 shortens FlashInfer's compilations: its modules hold four masks, nothing here asks for the
# multi-item one, and it hands custom ones to FA2's alone. Linked lazily, a module does without the rest;
# whoever asks for what is missing dies of it ("symbol lookup error").
if [ -n "${FEW_MASKS:-}" ]; then
  python3 - <<'PYTHON' || return
import pathlib, re
file = pathlib.Path("/tmp/site/flashinfer/jit/attention/modules.py")
loop = r"for mask_mode in \[0, 1, 2, 3\](:\s+\w+ = \(?\s*(?:gen_directory / )?f\"batch_prefill_paged_%s)"
text, few = re.subn(loop % "kernel", r"for mask_mode in [0, 1, 2]\1", file.read_text())
text, fewer = re.subn(loop % "sm90", r"for mask_mode in [0, 1]\1", text)
assert (few, fewer) == (1, 1), "FlashInfer's modules.py has other loops"
file.write_text(text)
PYTHON
  export FLASHINFER_EXTRA_LDFLAGS=-Wl,-z,lazy
fi
folder=/tmp/site/vllm/vllm_flash_attn
mkdir -p "$folder"
touch /tmp/site/vllm/__init__.py
for file in .so/*.xz; do
  [ -e "$file" ] || continue
  target=$folder/$(basename "${file%.xz}")
  case "$file" in *flashmla*) target=/tmp/site/vllm/$(basename "${file%.xz}") ;; esac
  [ -e "$target" ] || python3 -c "import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], 'wb'))" "$file" "$target"
done
