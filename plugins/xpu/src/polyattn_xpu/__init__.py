"""Intel GPUs: FlashAttention through vllm-xpu-kernels."""
