"""Context parallelism: polyattn's groups and layers for sequences whose keys lie on several ranks.

context = ContextParallel(mesh["context"])            # the ranks that share sequences
shared = ContextGroup(group, context)                 # a polyattn.LayerGroup over them
layer = ContextAttention(shared, polyattn.Attention(group))
"""

from __future__ import annotations

from polyattn_context_parallel.group import ContextGroup
from polyattn_context_parallel.layer import ContextAttention
from polyattn_context_parallel.ranks import ContextParallel, ParallelError

__all__ = ["ContextAttention", "ContextGroup", "ContextParallel", "ParallelError"]
