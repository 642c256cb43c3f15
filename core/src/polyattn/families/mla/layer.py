"""What does an engine hold for MLA? `LatentAttention`: prefill expanded, decode absorbed.

Multi-head latent attention (DeepSeek-AI, 2024): all heads' keys and values are made from one latent
a token, `k = [W_UK c, k_rope]`, `v = W_UV c`, and the cache holds `[c, k_rope]` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyattn.api import select_for_layer
from polyattn.errors import BatchError, SpecError
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend, LayerParams
from polyattn.runtime.batch import Batch, check_lens_against_table, check_on_device
from polyattn.runtime.group import Walk, capturing, load_backend
from polyattn.runtime.kv_cache import STORAGE_DTYPES, KVCache, raw
from polyattn.runtime.merge import AttentionState, merge_states
from polyattn.settings import current
from polyattn.spec.decompose import expanded, expanded_context
from polyattn.spec.layer import AttentionKind, LayerSpec

if TYPE_CHECKING:
    from polyattn.api import Selection

EXPANDED_BYTES = 256 << 20
"""Keys and values that a prefill makes of cached latents at a time: the bound of its workspace."""


@dataclass
class Expansion:
    """A part of a prefill: which cached tokens its keys and values are made of, and its plan.

    `slots` int64 (rows,): the tokens of each sequence padded to whole blocks of `block`; padding
    repeats a real token, so that nothing unwritten is read.
    """

    backend: AttentionBackend
    slots: Tensor
    block: int


class LatentRuntime:
    """The loaded backends of one MLA selection and the plan of the current step.

    Decodes at the front of a batch go to the MLA backend, absorbed; the rest is expanded and goes to
    an ordinary attention backend, the cached context in pieces, all merged. A sparse layer has no
    expanded form: both its phases run over the latent cache, each with the rows it attends to.
    """

    def __init__(self, selection: Selection):
        decision = selection.decision
        self.spec, self.device = decision.spec, decision.device
        self.sparse = self.spec.kind is AttentionKind.SPARSE_MLA
        assert selection.decode is not None and decision.block_size is not None
        self.block_size = decision.block_size
        self.walk = Walk(self.block_size, decision.kernel_block_sizes[1])
        self.decode = load_backend(selection.decode, self.spec, self.device, AttentionBackend)
        if self.sparse:
            self.prefill = load_backend(selection.prefill, self.spec, self.device, AttentionBackend)
        self._info: BackendInfo = selection.prefill
        self._own: AttentionBackend | None = None
        self._contexts: list[AttentionBackend] = []
        self.checks = False
        self.batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        """Prepare one step for every layer of the selection. Raises `BatchError`."""
        check_lens_against_table(batch, self.block_size)
        if batch.block_table is None and batch.num_seqs:
            raise BatchError(f"{self.spec} attends over a cache; the batch has no block_table")
        self.batch = None  # a plan that fails half-way must not look current
        self.split = batch.num_decodes
        self.expansions: list[Expansion] = []
        if self.split:
            part = batch.part(0, self.split)
            self.decode.plan(part if self.sparse else self.walk.expand(part))
        if self.split < batch.num_seqs:
            rest = batch.part(self.split, batch.num_seqs)
            if self.sparse:
                self.prefill.plan(rest)
            else:
                self._plan_expansions(rest)
        self.batch = batch

    def _plan_expansions(self, batch: Batch) -> None:
        """List the parts: each query's own new tokens, then the context in pieces that fit."""
        spec, block = self.spec, self._info.capabilities.preferred_block_size
        own = self._own = self._own or self._load(expanded(spec))
        queries = batch.query_lens
        contexts = [max(n - q, 0) for n, q in zip(batch.lens, queries, strict=True)]
        # A padding row (one query token, length 0) has no new token either.
        fresh = [min(n, q) for n, q in zip(batch.lens, queries, strict=True)]
        self._add(own, batch, contexts, fresh, block)
        width = spec.num_heads * (spec.head_size + spec.v_head_size)
        rows = EXPANDED_BYTES // (width * STORAGE_DTYPES[spec.dtype].itemsize)
        # An empty query has nothing to attend with.
        counts = [n if q else 0 for n, q in zip(contexts, queries, strict=True)]
        having = sum(n > 0 for n in counts)
        step = max(block, rows // max(having, 1) // block * block)
        for number, start in enumerate(range(0, max(counts, default=0), step)):
            if number == len(self._contexts):
                self._contexts.append(self._load(expanded_context(spec)))
            lens = [min(max(n - start, 0), step) for n in counts]
            self._add(self._contexts[number], batch, [start] * len(lens), lens, block)

    def _load(self, spec: LayerSpec) -> AttentionBackend:
        return load_backend(self._info, spec, self.device, AttentionBackend)

    def _add(
        self,
        backend: AttentionBackend,
        batch: Batch,
        firsts: list[int],
        lens: list[int],
        block: int,
    ) -> None:
        """Plan `backend` over tokens `firsts[i]` to `firsts[i] + lens[i]` of each sequence."""
        assert batch.block_table is not None
        seqs, positions, rows, count = [], [], [], 0
        blocks = [-(-n // block) for n in lens]
        width = max(blocks, default=0)
        for index, (first, length) in enumerate(zip(firsts, lens, strict=True)):
            padded = torch.arange(blocks[index] * block).clamp(max=max(length - 1, 0)) + first
            positions.append(padded)
            seqs.append(torch.full_like(padded, index))
            row = torch.zeros(width, dtype=torch.int32)
            row[: blocks[index]] = torch.arange(count, count + blocks[index])
            rows.append(row)
            count += blocks[index]
        device = batch.device
        seq, position = torch.cat(seqs).to(device), torch.cat(positions).to(device)
        table = torch.stack(rows).to(device)
        block_of = batch.block_table[seq, position // self.block_size].long()
        slots = block_of * self.block_size + position % self.block_size
        backend.plan(Batch(batch.starts, lens, table, device=device))
        self.expansions.append(Expansion(backend, slots, block))

    def forward(
        self,
        query: Tensor,
        entry: Tensor,
        cache: KVCache,
        weights: tuple[Tensor, Tensor],
        params: LayerParams,
        topk: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the step's latents and attend, as planned. Writes `out` (and `lse`)."""
        batch, at = self.batch, self.split
        assert batch is not None, "plan(batch) comes before forward"
        if self.checks and not capturing(query):
            check_on_device(batch, cache.num_blocks, cache.block_size)
        if batch.slot_mapping is not None:
            rank = cache.value.shape[3]
            self.decode.write_kv(entry, entry[..., :rank], cache, batch.slot_mapping, params)
        if self.sparse:
            self._forward_sparse(query, cache, weights, params, topk, out, lse)
            return
        if at:
            part = None if lse is None else lse[:at]
            self._absorbed(query[:at], cache, weights, params, out[:at], part)
        if at < batch.num_seqs:
            part = None if lse is None else lse[at:]
            self._expanded(query[at:], cache, weights, params, out[at:], part)

    def _absorbed(
        self,
        query: Tensor,
        cache: KVCache,
        weights: tuple[Tensor, Tensor],
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        found = query.new_empty(*query.shape[:2], cache.value.shape[3])
        if self.walk.moved(cache):
            assert self.batch is not None
            self.plan(self.batch)
        view = self.walk.view(cache)
        self.decode.forward_decode(absorb(query, weights[0]), view, params, found, lse)
        project(found, weights[1], out)

    def _forward_sparse(
        self,
        query: Tensor,
        cache: KVCache,
        weights: tuple[Tensor, Tensor],
        params: LayerParams,
        topk: Tensor | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        assert topk is not None
        at, size = self.split, self.block_size
        positions = topk.clamp(min=0).long()
        blocks = self._token_rows().long().gather(1, positions // size)
        slots = (blocks * size + positions % size).int().masked_fill_(topk < 0, -1)
        found = query.new_empty(*query.shape[:2], cache.value.shape[3])
        latent = absorb(query, weights[0])
        for backend, rows in ((self.decode, slice(0, at)), (self.prefill, slice(at, len(query)))):
            if rows.start < rows.stop:
                backend.forward_sparse(
                    latent[rows], cache, slots[rows], params, found[rows],
                    None if lse is None else lse[rows],
                )  # fmt: skip
        project(found, weights[1], out)

    def _token_rows(self) -> Tensor:
        """Return each query token's row of the block table, int32 (num_tokens, max_blocks)."""
        batch = self.batch
        assert batch is not None and batch.block_table is not None
        if batch.num_decodes == batch.num_seqs:  # as it is, where a captured graph reads it
            return batch.block_table
        counts = torch.tensor(batch.query_lens, device=batch.device)
        return torch.repeat_interleave(batch.block_table, counts, dim=0)

    def _expanded(
        self,
        query: Tensor,
        cache: KVCache,
        weights: tuple[Tensor, Tensor],
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        states = []
        for index, part in enumerate(self.expansions):
            made = self._expand(cache, part, weights, params, query.dtype)
            # The only part writes where it belongs; others are merged there.
            result = out if len(self.expansions) == 1 else torch.empty_like(out)
            precise = torch.float64 if query.dtype == torch.float64 else torch.float32
            state_lse = query.new_empty(query.shape[:2], dtype=precise)
            forward = part.backend.forward_prefill
            forward(query, None, None, made, LayerParams(), result, state_lse)
            states.append(AttentionState(result, state_lse))
            if index:
                states = [merge_states(states)]
        if states[0].output is not out:
            out.copy_(states[0].output)
        if lse is not None:
            lse.copy_(states[0].lse)

    def _expand(
        self,
        cache: KVCache,
        part: Expansion,
        weights: tuple[Tensor, Tensor],
        params: LayerParams,
        dtype: torch.dtype,
    ) -> KVCache:
        """Make keys and values of cached latents: pages of `part.block` tokens."""
        spec, rank = self.spec, cache.value.shape[3]
        stored = cache.key
        blocks, offsets = part.slots // self.block_size, part.slots % self.block_size
        rows = raw(stored)[blocks, offsets, 0].view(stored.dtype).to(dtype)
        if stored.dtype.itemsize == 1:
            rows = rows * params.k_scale
        latent, rope = rows[:, :rank], rows[:, rank:]
        nope = spec.head_size - rope.shape[1]
        pages = (len(rows) // part.block, part.block, spec.num_heads)
        key = rows.new_empty(len(rows), spec.num_heads, spec.head_size)
        key[..., :nope] = torch.einsum("tr,hnr->thn", latent, weights[0])
        key[..., nope:] = rope[:, None]
        value = torch.einsum("tr,hrv->thv", latent, weights[1])
        return KVCache(
            key.view(*pages, spec.head_size), value.contiguous().view(*pages, spec.v_head_size)
        )


def absorb(query: Tensor, w_uk: Tensor) -> Tensor:
    """Return `[q_nope W_UK, q_rope]`, (tokens, heads, rank + rope), of (tokens, heads, nope + rope)."""
    nope, rank = w_uk.shape[1], w_uk.shape[2]
    rope = query.shape[2] - nope
    found = query.new_empty(*query.shape[:2], rank + rope)
    found[..., :rank] = torch.bmm(query[..., :nope].transpose(0, 1), w_uk).transpose(0, 1)
    found[..., rank:] = query[..., nope:]
    return found


def project(latent: Tensor, w_uv: Tensor, out: Tensor) -> None:
    """Write `latent W_UV`: (tokens, heads, rank) to (tokens, heads, v_head_size)."""
    out.copy_(torch.bmm(latent.transpose(0, 1), w_uv).transpose(0, 1))


class LatentAttention(nn.Module):
    """One MLA layer on the selected backends.

    - `w_uk` (num_heads, nope size, rank), `w_uv` (num_heads, rank, v_head_size): the halves of the
      up-projection (`kv_b_proj`), in the layer's dtype.
    - `k_scale`: a quantised cache holds `latent / scale`.
    - `checks`: check block tables and slots on the device each step (default: setting `checks`).

    Built from a `Selection` it shares that selection's plan with the other layers built from it.
    Raises `SpecError`, and what `select` raises.
    """

    def __init__(
        self,
        selection: Selection | LayerSpec,
        w_uk: Tensor,
        w_uv: Tensor,
        *,
        k_scale: float = 1.0,
        checks: bool | None = None,
    ):
        super().__init__()
        if isinstance(selection, LayerSpec):
            selection = select_for_layer(selection)
        self.selection, spec = selection, selection.spec
        if spec.latent is None:
            raise SpecError(f"{spec} is no MLA layer; use Attention or Recurrent")
        runtime = selection.runtime
        assert isinstance(runtime, LatentRuntime)
        self.runtime = runtime
        self.runtime.checks |= current().checks if checks is None else checks
        if not (isinstance(k_scale, (int, float)) and 0 < k_scale < float("inf")):
            raise SpecError(f"k_scale={k_scale!r} must be a positive number")
        self.params = LayerParams(k_scale=float(k_scale), v_scale=float(k_scale))
        nope = spec.head_size - spec.latent.rope_head_size
        shapes = {
            "w_uk": (spec.num_heads, nope, spec.latent.rank),
            "w_uv": (spec.num_heads, spec.latent.rank, spec.v_head_size),
        }
        self._dtype = STORAGE_DTYPES[spec.dtype]
        for (name, shape), tensor in zip(shapes.items(), (w_uk, w_uv), strict=True):
            if tensor.shape != shape or tensor.dtype is not self._dtype:
                raise SpecError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be {shape} of "
                    f"{self._dtype}"
                )
        device = selection.device.torch_device
        self.weights = (w_uk.detach().to(device), w_uv.detach().to(device))

    def plan(self, batch: Batch) -> None:
        """Prepare one step for all layers of this selection; `forward` does it when it wasn't."""
        self.runtime.plan(batch)

    def forward(
        self,
        query: Tensor,
        latent: Tensor,
        rope_key: Tensor,
        cache: KVCache,
        batch: Batch | None = None,
        *,
        topk: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Store the step's latents in `cache` and attend.

        `query` (num_tokens, num_heads, head_size), the part without positions first; `latent`
        (num_tokens, rank), after its norm; `rope_key` (num_tokens, rope size), rotated. `topk` int32
        (num_tokens, topk), for a sparse layer: positions in the token's sequence, -1 for none. Returns
        (num_tokens, num_heads, v_head_size), written to `out` where given, and the LSE where the spec
        says `needs_lse`. Raises `BatchError`; nothing was changed then.
        """
        runtime, spec = self.runtime, self.selection.spec
        assert spec.latent is not None
        if batch is not None and batch is not runtime.batch:
            runtime.plan(batch)
        batch = runtime.batch
        if batch is None:
            raise BatchError("no batch: pass batch=, or call plan(batch) first")
        tokens = batch.num_tokens
        if out is None:
            out = query.new_empty(tokens, spec.num_heads, spec.v_head_size)
        expected = {
            "query": (query, (tokens, spec.num_heads, spec.head_size), self._dtype),
            "latent": (latent, (tokens, spec.latent.rank), self._dtype),
            "rope_key": (rope_key, (tokens, spec.latent.rope_head_size), self._dtype),
            "out": (out, (tokens, spec.num_heads, spec.v_head_size), self._dtype),
            "cache.key": (
                cache.key,
                (cache.num_blocks, runtime.block_size, 1, spec.latent.size),
                cache.key.dtype,
            ),
        }
        if (topk is not None) != runtime.sparse:
            raise BatchError(
                f"topk {'was given' if topk is not None else 'is missing'}: {spec} "
                f"{'attends to chosen tokens' if runtime.sparse else 'attends to every token'}"
            )
        if topk is not None:
            expected["topk"] = (topk, (tokens, topk.shape[-1]), torch.int32)
        for name, (tensor, shape, dtype) in expected.items():
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise BatchError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be {shape} of {dtype}"
                )
        entry = torch.cat([latent, rope_key], dim=1)[:, None]
        lse = None
        if spec.needs_lse:
            lse = query.new_empty(tokens, spec.num_heads, dtype=torch.float32)
        runtime.forward(query, entry, cache, self.weights, self.params, topk, out, lse)
        return out if lse is None else (out, lse)

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{self.selection.spec}; {self.selection.decision.summary()}"
