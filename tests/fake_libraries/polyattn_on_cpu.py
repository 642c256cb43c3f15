"""A pytest plugin that lets the CUDA adapters run on CPU tensors: the chip's size."""

from __future__ import annotations

from types import SimpleNamespace

import polyattn_fakes
import torch
from polyattn.runtime import workspaces

polyattn_fakes.EMPTY_ROW = 0.0  # flash-attn's CUDA kernels write zeros there, and say so
torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=132)
workspaces.torch = polyattn_fakes.UNFILLED
