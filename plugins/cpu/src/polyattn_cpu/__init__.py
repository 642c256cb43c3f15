"""polyattn's CPU plugin: attention in plain torch, on the CPU and wherever torch runs, and in C++."""
