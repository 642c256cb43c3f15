"""What is the right answer for MLA? Every head's keys and values, made in full, then attention."""

from __future__ import annotations

import torch
from torch import Tensor

from polyattn.families.attention import reference
from polyattn.families.sparse.reference import chosen_slots
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec


def keys_and_values(
    rows: Tensor, weights: tuple[Tensor, Tensor], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Return K (tokens, heads, head_size) and V of cached rows (tokens, rank + rope)."""
    w_uk, w_uv = (w.detach().to("cpu", dtype) for w in weights)
    rank = w_uk.shape[2]
    latent, rope = rows[:, :rank], rows[:, rank:]
    nope = torch.einsum("tr,hnr->thn", latent, w_uk)
    key = torch.cat([nope, rope[:, None].expand(-1, nope.shape[1], -1)], dim=2)
    return key, torch.einsum("tr,hrv->thv", latent, w_uv)


def forward(
    spec: LayerSpec,
    query: Tensor,
    cache: KVCache,
    batch: Batch,
    weights: tuple[Tensor, Tensor],
    params: LayerParams | None = None,
    choice: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Run an MLA layer over a batch whose new tokens are already in `cache`.

    Neither absorbed nor in chunks; for a sparse layer one query at a time, over what its row of
    `choice`, as the layer takes it, names. Returns (num_tokens, num_heads, v_head_size) and the LSE.
    """
    params = params or LayerParams()
    output = torch.zeros(
        batch.num_tokens, spec.num_heads, spec.v_head_size, dtype=dtype, device="cpu"
    )
    lse = torch.full((batch.num_tokens, spec.num_heads), -torch.inf, dtype=dtype, device="cpu")
    whole, read = spec.sparse is not None and spec.sparse.physical, batch
    if whole:  # a choice of places in the cache: it is one sequence
        table = torch.arange(cache.num_blocks, dtype=torch.int32, device="cpu")[None]
        read = Batch.from_lens([0], [cache.num_blocks * cache.block_size], table, cache.block_size)
    for index in range(batch.num_seqs):
        mine = slice(batch.starts[index], batch.starts[index + 1])
        rows, _ = reference.read_cache(cache, read, 0 if whole else index, params, dtype)
        chosen = None if choice is None else choice[mine, 0]
        output[mine], lse[mine] = attend(spec, query[mine], rows[:, 0], weights, chosen, dtype)
    return output, lse


def attend(
    spec: LayerSpec,
    query: Tensor,
    rows: Tensor,
    weights: tuple[Tensor, Tensor],
    choice: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend for one sequence, with all of its latents (tokens, rank + rope).

    `choice` int32 (queries, K): the ids of each query, which are the sequence's last tokens. Physical ids
    name rows of the cache, which `rows` then is.

    Returns the output (queries, num_heads, v_head_size) and the LSE (queries, num_heads).
    """
    plain = _plain(spec)
    key, value = keys_and_values(rows, weights, dtype)
    if choice is None:
        return reference.attend(plain, query, key, value, None, dtype)
    alone = plain.replace(causal=False)
    output = torch.zeros(len(query), spec.num_heads, spec.v_head_size, dtype=dtype, device="cpu")
    lse = torch.full((len(query), spec.num_heads), -torch.inf, dtype=dtype, device="cpu")
    first = len(rows) - len(query)
    for token, ids in enumerate(choice.tolist()):
        # As if the sequence were one block, at the start of the cache.
        chosen = chosen_slots(spec, ids, first + token, len(rows), [0], max(len(rows), 1))
        output[token], lse[token] = (
            state[0]
            for state in reference.attend(
                alone, query[token : token + 1], key[chosen], value[chosen], None, dtype
            )
        )
    return output, lse


def _plain(spec: LayerSpec) -> LayerSpec:
    return LayerSpec(
        num_heads=spec.num_heads,
        head_size=spec.head_size,
        v_head_size=spec.v_head_size,
        scale=spec.scale,
        causal=spec.causal,
    )
