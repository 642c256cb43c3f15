"""polyattn's Triton kernels, for every vendor that Triton serves."""
