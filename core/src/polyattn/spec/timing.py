"""What is measured of a backend? `TimingModel`: coefficients of terms with names."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.spec.kinds import ITEM_BYTES
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import row_widths

TERMS = ("launch", "item", "byte", "longest", "product", "token")
"""What a coefficient, in microseconds, is for: a call; a (row, KV head); a byte of keys and values that
are read; a byte of one KV head's in the longest row, where no keys are cut; a multiply-add; a byte of
queries and outputs. Short rows multiply whole tiles of queries."""
OVERLAPPING = ("byte", "longest", "product")
"""Terms of what a chip may do at the same time."""
STEPS = ("decode", "short", "prefill", "chunked", "mixed")
STEP_OF = {"low": "short", "windowed": "chunked", "ragged": "prefill"}
STEP_OF |= dict.fromkeys(("ungrouped", "dealt", "cores"), "decode")
"""The kind of step that each other kind is a part of."""
KINDS = (*STEPS, *STEP_OF)
"""Steps that a model speaks of. Rows have one token, or up to a few; are whole prompts, whose keys and
values are at hand, or chunks behind a context; or both long and short ones are in one call. `low` is
none of these, but what a library runs where a row's queries fit in its lowest tile; `windowed` what it
runs where a window hides keys, `ragged` over keys that lie packed, of prompts of several lengths or of
one alone, `ungrouped` for decodes of fewer than `GROUPED` query heads a KV head, without a window.
`dealt` speaks of decodes by how their keys are dealt out, `cores` of those that run on CUDA cores."""
GROUPED = 4
"""Query heads of a KV head from which on FLASHINFER's decodes go to tensor cores, as windowed ones do."""

DEALS = ("even", "padded", "cut", "pages", "heads", "whole", "runs", "packed")
"""How a library deals keys out to a chip's processors; `selection.dealing` knows each way."""

WINDOWLESS = ("TRITON_ATTN", "FLASH_ATTN_V3")
"""Backends that run a step without the layer's window where that hides nothing."""


@dataclass(frozen=True)
class TimingModel:
    """Measured coefficients of one backend for one kind of step, in the order of `TERMS`.

    `whole`: tiles of query rows, over all KV heads, from which on the longest row counts: with fewer
    tiles than processors libraries cut the keys. `overlap`: reading, the longest row and products hide
    behind one another, so that the largest of the three counts; else they add up. `error`: the median
    relative error on points that it was not fitted to. `margin`: a backend is chosen only where its
    prediction is better by so much, because predictions err; none for the backend that was the fastest
    on the whole. `level`: of `batch_invariant`, at which it was measured;
    empty: none. `host`: microseconds after which a host is ready with a layer's call and can queue the
    next one; 0: not known, or no device works meanwhile. `by_run`: the launch and the host's time count
    once for each run of neighbouring rows of equal lengths, as of dense kernels, and not once a call.
    `deal`: how keys are dealt out to `processors`, one of `DEALS`; empty: not known. `windowless`: it
    speaks of a windowed layer's steps in which the window hides nothing, and of no others.
    """

    backend: str
    kind: str
    coefficients: tuple[float, ...]
    overlap: bool = False
    error: float = 0.0
    source: str = ""
    margin: float = 0.0
    whole: int = 0
    level: str = ""
    host: float = 0.0
    by_run: bool = False
    deal: str = ""
    processors: int = 0
    windowless: bool = False

    @property
    def step(self) -> str:
        """The kind of step of the model's calls, one of `STEPS`."""
        return STEP_OF.get(self.kind, self.kind)

    def weights(self, spec: LayerSpec) -> tuple[float, ...]:
        """Return microseconds of (1, rows, keys, longest, pairs, queries) for layers of `spec`."""
        return tuple(c * unit for c, unit in zip(self.coefficients, units(spec), strict=True))


def units(spec: LayerSpec) -> tuple[float, ...]:
    """Return the factor of each term for (1, one row, key, longest key, pair, query) of a layer."""
    if spec.latent is not None:  # absorbed: one latent a key, every head's query as wide
        size = spec.latent.size
        kv_heads, held = 1, row_widths(spec.stored_dtype, size, size)[0]
        wide = spec.num_heads * (spec.latent.size + spec.latent.rank)
    else:
        kv_heads = spec.num_kv_heads
        held = sum(row_widths(spec.stored_dtype, spec.head_size, spec.v_head_size))
        wide = spec.num_heads * (spec.head_size + spec.v_head_size)
    return (1, kv_heads, kv_heads * held, held, wide, wide * ITEM_BYTES[spec.dtype])
