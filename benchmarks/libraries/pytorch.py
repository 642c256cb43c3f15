"""torch's own `scaled_dot_product_attention`, over a step whose sequences are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.functional import scaled_dot_product_attention


def sdpa(work: Any) -> Callable[[], object]:
    """A dense call over views of the packed tokens, which returns an output of its own."""
    spec, rows = work.spec, work.batch.num_seqs
    keys = sum(work.batch.lens)
    tokens = (work.query, work.key[:keys], work.value[:keys])
    dense = [each.unflatten(0, (rows, -1)).transpose(1, 2) for each in tokens]
    how = {"is_causal": spec.causal, "scale": spec.scale, "enable_gqa": spec.gqa_ratio > 1}
    return lambda: scaled_dot_product_attention(*dense, **how).transpose(1, 2).flatten(0, 1)
