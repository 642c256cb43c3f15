"""How is a step of MLA planned? Short rows absorbed, over latents; long ones expanded, in pieces.

In a captured step all rows are absorbed.

In multi-head latent attention (DeepSeek-AI, 2024) one latent a token gives all heads' keys and values:
`k = [W_UK c, k_rope]`, `v = W_UV c`. The cache holds `[c, k_rope]` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from polyattn.families.attention.planning import Chooser
from polyattn.families.attention.rotation import rotation_of
from polyattn.families.attention.sharing import Sharing
from polyattn.families.mla.absorption import absorb, expand_rows, project
from polyattn.families.mla.expanding import ExpandedChooser
from polyattn.runtime.backend import MergeBackend, SparseBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.decompositions import Part, Phases, by_phase, planned_call, refill_call
from polyattn.runtime.group import LayerGroup, StepPlan, StepPlanner
from polyattn.runtime.merge import MergeBuffers, Merged, is_dense
from polyattn.runtime.program import Call, Frame, LayerParams, Op
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.block_tables import each_token
from polyattn.runtime.step.chosen_pages import check_places
from polyattn.runtime.store import Store, claimed_rotation
from polyattn.spec.kinds import AttentionKind, Invariance
from polyattn.spec.layer import LayerSpec

EXPANDED_BYTES = 256 << 20
"""Keys and values that a prefill makes of cached latents at a time: the bound of its workspace."""
APART = 4
"""Requests whose contexts share that bound under `batch_invariant`, in every step."""


class ChosenRows(Op):
    """A choice as cache rows, int32 (num_tokens, K), -1 for none."""

    def __init__(self, backend: SparseBackend, spec: LayerSpec, batch: Batch, block_size: int):
        self.backend, self.spec, self.batch, self.block_size = backend, spec, batch, block_size

    def run(self, frame: Frame) -> None:
        assert frame.choice is not None
        frame.choice = self.backend.place(self.spec, frame.choice, self.batch, self.block_size, 0)


class Absorbed(Op):
    """A call over latents, as MQA, between the halves of the up-projection where the layer has them."""

    def __init__(self, call: Call, counts: Sequence[int] | None = None):
        """`counts`: tokens of each request, whose products are then calls of their own."""
        self.call, self.rows, self.counts = call, call.rows, counts
        self.inner = (call,)

    def run(self, frame: Frame) -> None:
        weights, cache, out = frame.params.weights, frame.cache, frame.out
        assert cache is not None
        inner = frame.but(key=None, value=None)
        if weights is not None:
            inner.query = absorb(frame.query, weights[0], self.counts)
        # Straight into the caller's tensor if a backend can write it: dense, aligned.
        direct = weights is None and is_dense(out)
        if not direct:
            inner.out = out.new_empty(*out.shape[:2], cache.format.v_head_size)
        inner.fresh = frame.fresh or not direct
        self.call.run(inner)
        result = inner.out if weights is None else project(inner.out, weights[1], self.counts)
        frame.set_out(result)


class Expansion(Op):
    """A piece of a prefill: MHA over keys and values that are made of cached latents for the call.

    `slots` int64 (tokens,): the sequences' tokens one after another. `counts`: as `Absorbed`'s.
    """

    def __init__(self, call: Call, slots: Tensor, counts: Sequence[int] | None = None):
        self.call, self.slots, self.counts = call, slots, counts
        self.inner = (call,)

    def run(self, frame: Frame) -> None:
        cache, params = frame.cache, frame.params
        assert cache is not None and params.weights is not None
        key, value = expand_rows(
            cache, self.slots, params.weights, params, frame.query.dtype, self.counts
        )
        self.call.run(Frame(frame.query, key, value, None, LayerParams(), frame.out, frame.lse))


class Expanded(Merged):
    """The pieces of a prefill, merged."""

    def run(self, frame: Frame) -> None:
        super().run(frame.but(query=frame.query.contiguous()))


class LatentStep(StepPlan):
    """A step over latents: its store, absorbed calls, and the pieces of expanded ones."""

    def __init__(self, group: LayerGroup, batch: Batch, before: Store, ops: Sequence[Op]):
        super().__init__(group, batch, (before, *ops))
        self.before = before
        self.expands = any(isinstance(op, Expanded) for op in ops)


class Planner(StepPlanner):
    """Plans for MLA and sparse MLA over a latent cache.

    A sparse layer has no expanded form: both its phases attend to rows that are chosen for them.
    """

    def __init__(self, group: LayerGroup):
        self.group, self.spec = group, group.spec
        selection = group.selection
        self.sparse = self.spec.kind is AttentionKind.SPARSE_MLA
        decode, prefill = selection.backend("decode"), selection.backend("prefill")
        assert decode is not None and prefill is not None
        self.names = {"decode": decode.name, "prefill": prefill.name}
        self.chooser: Chooser | None = None
        self.expanding: ExpandedChooser | None = None
        if not self.sparse:
            self.chooser = Chooser(group, ("decode",))
        self.longest_decode = decode.capabilities.decode_query_lens
        if self.sparse:
            self.over_chosen = {
                phase: group.backend(phase, SparseBackend, cache=group.kernel_format(info))
                for phase, info in (("decode", decode), ("prefill", prefill))
            }
        self.store = group.store
        self.rotated_by = claimed_rotation(group, self.store)
        self.merge = group.backend("merge", MergeBackend)
        self.apart = bool(self.spec.batch_invariant)
        self.by_token = self.spec.batch_invariant >= Invariance.STEPS
        if not (self.sparse or self.by_token):  # whose rows are all absorbed
            self.expanding = ExpandedChooser(group)
        self.buffers = MergeBuffers()
        self.sharing = Sharing.of(group)

    def check_cache(self, cache: KVCache) -> None:
        if self.sparse:
            check_places(cache)

    def check(self, batch: Batch) -> None:
        batch.check_queries(list(self.names.values()))
        assert self.group.cache_format is not None
        batch.check_pages(self.group.cache_format.block_size)

    def plan(self, batch: Batch) -> LatentStep:
        form = self.group.cache_format
        assert form is not None
        # A captured step makes no keys of latents: how many there are changes from replay to replay.
        captured = bool(self.spec.graph_capture) and batch.lens_are_bounds
        read_back = self.sharing.looks and self.sharing.look(batch)
        ops: list[Op] = []
        phases = self._phases(batch)
        for phase, part in (("decode", phases.decode), ("prefill", phases.prefill)):
            if part is None or not part.batch.num_tokens:
                continue
            if phase == "decode" or self.sparse or captured:
                call = self._absorbed(phase, part)
                ops.append(Absorbed(call, part.batch.query_lens if self.apart else None))
            else:
                ops.append(self._expanded(part))
        if read_back:
            self.sharing.learn(any(call.saved_bytes for op in ops for call in op.calls))
        if self.sparse and ops:
            (call, *_) = ops[0].calls
            assert isinstance(call.backend, SparseBackend)
            ops.insert(0, ChosenRows(call.backend, self.spec, batch, form.block_size))
        rotation = rotation_of(self.spec, batch)
        before = Store(self.spec, batch, self.store, self.rotated_by, rotation)
        return LatentStep(self.group, batch, before, ops)

    def refill(self, step: LatentStep, batch: Batch) -> None:
        phases = self._phases(batch)
        form = None if self.sparse else self.group.cache_format
        # A captured step has no other calls: how many keys are expanded changes from step to step.
        for call in (call for op in step.ops if isinstance(op, Absorbed) for call in op.calls):
            refill_call(form, call, phases.of(call))
        rotation_of(self.spec, batch, step.before.rotation)

    def reads_tensors(self, step: LatentStep) -> bool:
        if step.before.rotation is not None or self.by_token:
            return True
        return any(call.backend.reads_tensors or call.block_size for call in step.calls)

    def _phases(self, batch: Batch) -> Phases:
        rows = batch if not self.by_token or batch.all_decode else each_token(batch)
        return by_phase(rows, 1 if self.sparse else self.longest_decode)

    def _absorbed(self, phase: str, part: Part) -> Call:
        if self.chooser is None:  # chosen rows lie in no blocks
            return planned_call(None, phase, self.names[phase], self.over_chosen[phase], part)
        if phase != "decode":  # prompts of a captured step, whose backend can't follow the lengths
            fastest = self.chooser.chosen["decode"]
        elif shared := self.sharing.call(part.batch, part.rows):
            return shared
        else:
            fastest = self.chooser.decode(part.batch)
        name = fastest.info.name
        return planned_call(self.group.cache_format, phase, name, fastest.backend, part)

    def note(self, step: StepPlan, call: Call) -> str:
        return self.sharing.note(step.batch, call)

    def _expanded(self, part: Part) -> Expanded:
        """List the pieces: each query's own new tokens, then the context in pieces that fit."""
        spec, batch = self.spec, part.batch
        queries = batch.query_lens
        contexts = [max(n - q, 0) for n, q in zip(batch.lens, queries, strict=True)]
        # A padding row (one query token, length 0) has no new token either.
        fresh = [min(n, q) for n, q in zip(batch.lens, queries, strict=True)]
        pieces = [self._piece(batch, contexts, fresh, causal=True)]
        width = spec.num_heads * (spec.head_size + spec.v_head_size)
        rows = EXPANDED_BYTES // (width * STORAGE_DTYPES[spec.dtype].itemsize)
        # An empty query has nothing to attend with.
        counts = [n if q else 0 for n, q in zip(contexts, queries, strict=True)]
        longest = max(counts, default=0)
        # Where a request's context is cut must not follow from the others' at any level.
        at_once = APART if self.apart else max(1, sum(n > 0 for n in counts))
        step_size = max(1, rows // at_once)
        for start in range(0, longest, step_size):
            lens = [min(max(n - start, 0), step_size) for n in counts]
            some = [i for i, n in enumerate(lens) if n]
            for first in range(0, len(some), at_once):
                mine = set(some[first : first + at_once])
                its = [n if i in mine else 0 for i, n in enumerate(lens)]
                pieces.append(self._piece(batch, [start] * len(its), its, causal=False))
        each = queries if self.apart else None
        parts = [(None, piece) for piece in pieces]
        return Expanded(parts, self.merge, self.buffers, part.rows, each)

    def _piece(
        self, batch: Batch, firsts: Sequence[int], lens: Sequence[int], causal: bool
    ) -> Expansion:
        """Plan the prefill over tokens `firsts[i]` to `firsts[i] + lens[i]` of each sequence."""
        assert batch.block_table is not None and self.group.cache_format is not None
        size, counts = self.group.cache_format.block_size, np.asarray(lens)
        seq = np.repeat(np.arange(len(counts)), counts)
        begin = np.asarray(firsts) - np.concatenate([[0], counts.cumsum()[:-1]])
        position = np.arange(len(seq)) + begin[seq]
        at = torch.from_numpy(np.stack([seq, position // size, position % size]).astype(np.int64))
        at = at.to(batch.device)
        slots = batch.block_table[at[0], at[1]].long() * size + at[2]
        keys = Batch(batch.starts, list(lens), device=batch.device)
        assert self.expanding is not None
        chosen = self.expanding.fastest(batch.query_lens, lens, causal)
        plan = chosen.backend.plan(keys if causal else keys.over_context())
        call = Call("prefill", chosen.info.name, chosen.backend, plan, None)
        return Expansion(call, slots, lens if self.apart else None)
