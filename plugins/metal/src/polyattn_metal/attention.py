"""MLX_ATTN, MLX_MLA: pages gathered by MLX, and attended to by its own kernel or by plain products."""

from __future__ import annotations

from typing import Any, ClassVar

import mlx.core as mx
import torch
from polyattn.kernel import (
    AttentionBackend,
    Batch,
    CacheFormat,
    Device,
    Frame,
    LayerParams,
    LayerSpec,
    Plan,
    absorbed,
    blank,
)

from polyattn_metal.bridge import Array, settle, stream, to_mlx, write
from polyattn_metal.planning import Tile, TilePlan

FUSED = (64, 128)
"""Head sizes for which MLX has one Metal kernel for any number of queries; it adds up in float32.

Elsewhere, and on the CPU, MLX composes attention of operators that round scores to the inputs' dtype, so
that 16-bit inputs are made float32 before.
"""


class MlxAttention(AttentionBackend):
    """Makes one call for each tile of a step. All calls start before it waits for any."""

    name: ClassVar[str] = "MLX_ATTN"

    def plan(self, batch: Batch, reuse: Plan | None = None) -> TilePlan:
        size = 1 if self.cache is None else self.cache.block_size
        with stream(batch.device):
            return TilePlan(batch, self.spec_of(batch), size)

    def run(self, plan: TilePlan, frame: Frame) -> None:
        query, key, value = frame.query, frame.key, frame.value
        cache, params, out, lse = frame.cache, frame.params, frame.out, frame.lse
        if cache is not None:
            key, value = cache.key, cache.value
        assert key is not None and value is not None
        settle(query.device)
        with stream(query.device):
            queries, keys = to_mlx(query), to_mlx(key)
            values = None if cache is not None and cache.value_in_key else to_mlx(value)
            sinks = None if params.sinks is None else to_mlx(params.sinks)
            slopes = None if params.alibi_slopes is None else to_mlx(params.alibi_slopes)
            sizes = {query.shape[-1], value.shape[-1]}
            fused = query.device.type != "cpu" and len(sizes) == 1 and sizes <= {*FUSED}
            parts = []
            for tile in plan.tiles:
                rows = queries[
                    tile.tokens if isinstance(tile.tokens, slice) else mx.array(tile.tokens)
                ]
                rows = rows.reshape(-1, tile.queries, *rows.shape[1:]).swapaxes(1, 2)
                if not fused:
                    rows = rows.astype(mx.float32)
                own = gathered(keys, tile.slots, cache is not None).astype(rows.dtype)
                theirs = own[..., : value.shape[-1]]
                if values is not None:
                    theirs = gathered(values, tile.slots, cache is not None).astype(rows.dtype)
                parts.append(
                    attend(
                        self.spec, tile, rows, own, theirs, params, sinks, slopes, lse is not None
                    )
                )
            mx.eval(parts)
        for tile, (output, logs) in zip(plan.tiles, parts, strict=True):
            tokens: Any = tile.tokens
            if not isinstance(tokens, slice):
                tokens = torch.from_numpy(tokens).to(out.device)
            write(out, tokens, output)
            if lse is not None:
                write(lse, tokens, logs)
        blank(plan.blind, out, lse)


class MlxMLA(MlxAttention):
    """Absorbed MLA decode: MQA whose one key is a latent, and whose value is the key's first part."""

    name: ClassVar[str] = "MLX_MLA"

    def __init__(self, spec: LayerSpec, cache: CacheFormat | None, device: Device):
        super().__init__(absorbed(spec), cache, device)


def gathered(pages: Array, slots: Array, paged: bool) -> Array:
    """Return keys or values (rows, KV heads, keys, size) at a tile's slots."""
    rows = pages[slots[0], slots[1]] if paged else pages[slots]
    return rows.swapaxes(1, 2)


def attend(
    spec: LayerSpec,
    tile: Tile,
    query: Array,
    key: Array,
    value: Array,
    params: LayerParams,
    sinks: Array | None,
    slopes: Array | None,
    needs_lse: bool,
) -> tuple[Array, Array | None]:
    """Attend for a tile: queries (rows, heads, queries, size), keys (rows, KV heads, keys, size).

    Returns outputs (tokens, heads, V size) and LSEs (tokens, heads). MLX's own kernel returns no LSE and
    knows no soft cap, and its additive masks are of the query's dtype, too coarse for ALiBi.
    """
    rows, heads, queries, _ = query.shape
    scale = spec.scale * params.k_scale
    lse = None
    if not needs_lse and slopes is None and spec.logit_soft_cap is None:
        mask = "causal" if tile.causal else None if tile.seen is None else tile.seen[:, None]
        own = None if sinks is None else sinks.astype(query.dtype)
        out = mx.fast.scaled_dot_product_attention(
            query, key, value, scale=scale, mask=mask, sinks=own
        )
    else:
        grouped = (rows, key.shape[1], heads // key.shape[1], queries)
        wide = (query.astype(mx.float32) * scale).reshape(*grouped, -1)
        scores = wide @ key.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
        if spec.logit_soft_cap is not None:
            scores = spec.logit_soft_cap * mx.tanh(scores / spec.logit_soft_cap)
        if slopes is not None:
            scores = scores + slopes.reshape(1, *grouped[1:3], 1, 1) * tile.distance[:, None, None]
        if tile.causal:
            width = scores.shape[-1]
            scores = mx.where(mx.tri(queries, width, width - queries, mx.bool_), scores, -mx.inf)
        elif tile.seen is not None:
            scores = mx.where(tile.seen[:, None, None], scores, -mx.inf)
        logs = mx.logsumexp(scores, axis=-1, keepdims=True)
        if sinks is not None:
            logs = mx.logaddexp(logs, sinks.reshape(1, *grouped[1:3], 1, 1))
        weights = mx.exp(scores - mx.where(logs == -mx.inf, 0.0, logs))
        out = (weights @ value.astype(mx.float32)[:, :, None]).reshape(rows, heads, queries, -1)
        lse = logs.reshape(rows, heads, queries).swapaxes(1, 2).reshape(-1, heads)
    out = out.swapaxes(1, 2).reshape(rows * queries, heads, -1)
    return (out if params.v_scale == 1.0 else out.astype(mx.float32) * params.v_scale), lse
