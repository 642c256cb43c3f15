#!/usr/bin/env bash
# Runs the conformance kit for every backend that this GPU has; counts go to the folder named.
# FlashInfer compiles minutes for each variant; what lies compiled in ./.aot is not compiled again.
out=$1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # the reference's threads, times the workers, would stand on each other
for backend in ${BACKENDS:-TRITON_ATTN TRITON_STORE TRITON_MERGE FLASH_ATTN_V3 CUDNN_ATTENTION FLASHINFER FLASHINFER_TRTLLM TORCH_SDPA TORCH_MLA TORCH_SCAN \
  FLASH_ATTN FLASH_ATTN_V4 XFORMERS FLEX_ATTENTION \
  TRITON_MLA TRITON_MLA_SPARSE TRITON_SCAN TRITON_TOKEN_SCAN FLASHMLA FLASHMLA_SPARSE FLASH_ATTN_MLA FLASHINFER_MLA FLA MAMBA_SSM}; do
  chosen=()
  # Their kernels are tuned or compiled anew for each shape: drawn shapes would take hours.
  case "$backend" in MAMBA_SSM | FLA | FLASHINFER*) chosen=(-k "not search") ;; esac
  (cd /tmp && python3 -m pytest -q -p no:cacheprovider --pyargs polyattn.conformance \
    --polyattn-backend "$backend" --polyattn-report "$out/conformance-$backend.json" \
    -n "${WORKERS:-8}" "${chosen[@]}" > "$out/$backend.log" 2>&1)
  tail -3 "$out/$backend.log" | cut -c1-160
done
