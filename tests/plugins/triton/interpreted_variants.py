"""Run in Triton's interpreter, in a process of its own: variants and masks on TRITON_ATTN."""
