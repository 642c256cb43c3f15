"""Kernels in C++ for the CPU, behind a plain C interface: no torch headers, no torch version."""
