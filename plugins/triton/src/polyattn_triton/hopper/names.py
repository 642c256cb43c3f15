"""Functions of Gluon by the names that the installed Triton has."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""The barrier of a program's threads: Triton 3.8.0 has renamed `thread_barrier`."""
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""The copy of addressed elements to shared memory: Triton 3.9.0 has removed its older name."""
async_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""The copy of a descriptor's box to shared memory: Triton 3.9.0 has removed its older name."""
