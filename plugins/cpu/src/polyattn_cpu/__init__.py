"""polyattn's CPU plugin: attention on torch alone, on the CPU and wherever else torch runs."""
