"""polyattn's Triton kernels: they belong to no vendor."""
