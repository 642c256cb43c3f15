"""What is measured of a backend? `TimingModel`: coefficients of terms that one can name."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.spec.kinds import ITEM_BYTES
from polyattn.spec.layer import LayerSpec

TERMS = ("launch", "item", "byte", "longest", "product", "token")
"""What a coefficient multiplies, in microseconds: once a call; (row, KV head); byte of all keys and
values read; byte of one KV head's keys and values in the longest row; multiply-add of a query
with a key or value; byte of queries and outputs."""
KINDS = ("decode", "short", "prefill", "mixed")
"""Steps that a model speaks of: one token a row; up to a few; more; of both sorts in one call."""


@dataclass(frozen=True)
class TimingModel:
    """Measured coefficients of one backend for one kind of step, in the order of `TERMS`.

    `error`: the median relative error of the fit on the points that it was fitted to.
    """

    backend: str
    kind: str
    coefficients: tuple[float, ...]
    error: float = 0.0
    source: str = ""

    def weights(self, spec: LayerSpec) -> tuple[float, ...]:
        """Return microseconds of (1, rows, keys, longest, pairs, queries) for layers of `spec`."""
        launch, item, byte, longest, product, token = self.coefficients
        width = spec.head_size + spec.v_head_size
        if spec.latent is not None:  # absorbed: one latent a key, every head's query as wide
            width, kv_heads = spec.latent.size, 1
            products = spec.num_heads * (spec.latent.size + spec.latent.rank)
            wide = spec.num_heads * (spec.latent.size + spec.latent.rank)
        else:
            kv_heads, products, wide = (
                spec.num_kv_heads,
                spec.num_heads * width,
                spec.num_heads * width,
            )
        stored = width * ITEM_BYTES[spec.stored_dtype]
        return (
            launch,
            item * kv_heads,
            byte * kv_heads * stored,
            longest * stored,
            product * products,
            token * wide * ITEM_BYTES[spec.dtype],
        )
