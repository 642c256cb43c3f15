"""polyattn's CUDA plugin: the NVIDIA kernel libraries behind one interface."""
