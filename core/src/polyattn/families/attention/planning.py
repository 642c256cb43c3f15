"""How is a step of attention planned? By phase: each part to its backend, whose plan it keeps."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.choice import Assignment, Chooser
from polyattn.families.attention.fused import in_heads, keys_in_heads, out_in_heads
from polyattn.families.attention.rotation import key_rotation_of, rotation_of
from polyattn.families.attention.sharing import Sharing
from polyattn.families.attention.text_positions import by_position
from polyattn.families.attention.transforms import Places, Transforms
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend, LayerParams, StoreBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, raw
from polyattn.runtime.cache.scales import dequantized, input_dtype, output_dtype
from polyattn.runtime.calls import planned_call
from polyattn.runtime.decompositions import Part, rows_within, whole_prompts
from polyattn.runtime.functions.pointwise import check_step_mask
from polyattn.runtime.group import LayerGroup, StepPlanner
from polyattn.runtime.inputs import bad_input, check_tensor, refuse_gradients
from polyattn.runtime.plan import Call, Rows, StepPlan, StorePlan
from polyattn.runtime.rotation import NewTokens, Rotation, prepared
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_padding, check_pages
from polyattn.runtime.store import RunRotated, claimed_rotation
from polyattn.spec.decompose import dense
from polyattn.spec.layer import LayerSpec


class AttentionStep(StepPlan):
    """The calls of a step, the store before them, and the shapes that its layers are held to."""

    def __init__(self, group: LayerGroup, batch: Batch, calls: tuple[Call, ...]):
        super().__init__(group, batch)
        self._calls = calls
        self.store: StorePlan | None = None
        self.stored_by: StoreBackend | None = None
        self.rotated_by: RunRotated | None = None
        # How the step's tokens are rotated, by a layer that rotates; of given keys, how those are.
        self.rotation: Rotation | None = None
        self.key_rotation: Rotation | None = None
        self.device, self.device_type = group.torch_device, group.device_type
        spec, tokens = group.spec, batch.num_tokens
        self.query_shape = torch.Size((tokens, spec.num_heads, spec.head_size))
        self.out_shape = torch.Size((tokens, spec.num_heads, spec.v_head_size))
        self.lse_shape = torch.Size((tokens, spec.num_heads))
        self.dtype, self.out_dtype = input_dtype(spec), output_dtype(spec)
        # The new tokens' keys and values; None where they are given whole.
        self.key_shape = self.value_shape = None
        if spec.cached:
            self.key_shape = torch.Size((tokens, spec.num_kv_heads, spec.head_size))
            self.value_shape = torch.Size((tokens, spec.num_kv_heads, spec.v_head_size))
        # Of keys that are given whole, as many as the sequences reach must be there.
        ends = [] if spec.cached else map(sum, zip(batch.key_starts, batch.lens, strict=True))
        self.keys_reach = max(ends, default=0)
        self.transforms = Transforms.of(spec)

    @property
    def calls(self) -> tuple[Call, ...]:
        return self._calls

    def call(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor | None,
        lse: Tensor | None,
    ) -> Tensor:
        """Check what was given and run. Returns the output, `out` where given; writes `lse`.

        Query, key and value may come in rows, (num_tokens, heads * size), and so may `out`. The cache's
        form is the caller's to check: it is the same at every step. Raises `BatchError`.
        """
        dtype, device = self.dtype, self.device
        if query.__class__ is not Tensor or query.device != device:
            check_tensor("query", query, device)
        if query.shape != self.query_shape or query.dtype is not dtype:
            if query.dim() == 2:
                query, key, value = in_heads(self.group.spec, query, key, value)
                return self.call(query, key, value, cache, params, out, lse)
            raise bad_input("query", query, self.query_shape, dtype)
        if out is None:
            out = query.new_empty(self.out_shape, dtype=self.out_dtype)
        else:
            if out.__class__ is not Tensor or out.device != device:
                check_tensor("out", out, device)
            if out.shape != self.out_shape or out.dtype is not self.out_dtype:
                if out.dim() == 2:
                    view = out_in_heads(self.group.spec, out)
                    self.call(query, key, value, cache, params, view, lse)
                    return out
                raise bad_input("out", out, self.out_shape, self.out_dtype)
        if key is not None and value is not None:
            key, value = self._checked(key, value)
        elif key is not None or value is not None or cache is None:
            self._check_missing(key, value, cache, params)
        # Kernels step by tokens and heads; what has gaps within a head is copied.
        if query.stride()[2] != 1:  # quicker than stride(2)
            query = query.contiguous()
        if out.stride()[2] != 1:
            raise BatchError(f"out has strides {out.stride()}; its last one must be 1")
        if torch.is_grad_enabled():
            refuse_gradients(query=query, key=key, value=value)
        if torch.is_autocast_enabled(self.device_type):
            with torch.autocast(self.device_type, enabled=False):
                self.run(query, key, value, cache, params, out, lse)
        else:
            self.run(query, key, value, cache, params, out, lse)
        return out

    def _checked(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as kernels take them. Raises `BatchError`."""
        if key.__class__ is not Tensor or key.device != self.device:
            check_tensor("key", key, self.device)
        if value.__class__ is not Tensor or value.device != self.device:
            check_tensor("value", value, self.device)
        if key.dim() == 2 or value.dim() == 2:
            key, value = keys_in_heads(self.group.spec, key, value)
        if self.key_shape is None:
            self._check_given(key, value)
        elif key.shape != self.key_shape or key.dtype is not self.dtype:
            raise bad_input("key", key, self.key_shape, self.dtype)
        elif value.shape != self.value_shape or value.dtype is not self.dtype:
            raise bad_input("value", value, self.value_shape or (), self.dtype)
        if key.stride()[2] != 1 or value.stride()[2] != 1:
            return key.contiguous(), value.contiguous()
        return key, value

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Add the bias, rotate and store. Returns what attention takes."""
        rotation = self.rotation if params.rotate else None
        if query.dtype.itemsize == 1:
            query, key, value = self._dequantized(query, key, value, params)
        new = NewTokens(query, key, value, params.qkv_bias)
        if self.store is not None and key is not None:
            assert cache is not None and self.rotated_by is not None
            return self.rotated_by(self.store, rotation, new, cache, params, self.keeps_keys)
        dtype = query.dtype
        if not self.group.spec.cached:
            assert key is not None and value is not None
            # Behind the last sequence's keys lies what nobody reads.
            new = NewTokens(query, key[: self.keys_reach], value[: self.keys_reach], new.bias)
        query, key, value = prepared(new, rotation, self.key_rotation if rotation else None)
        if self.group.spec.cached:  # nothing is stored: the cache holds the keys already
            return query.to(dtype), None, None
        assert key is not None and value is not None
        return query.to(dtype), key.to(dtype), value.to(dtype)

    def _dequantized(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, params: LayerParams
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return in the layer's dtype what came quantised: rotations and biases are added to that."""
        dtype = STORAGE_DTYPES[self.group.spec.dtype]
        query = dequantized(query, params.q_scale, dtype)
        if key is None or value is None:
            return query, None, None
        return (
            query, dequantized(key, params.k_scale, dtype), dequantized(value, params.v_scale, dtype)
        )  # fmt: skip

    @cached_property
    def keeps_keys(self) -> bool:
        """Whether a call can take rotated keys beside the cache: of whole prompts, stored unrounded."""
        spec, batch = self.group.spec, self.batch
        lens = zip(batch.query_lens, batch.lens, strict=True)
        return spec.stored_dtype == spec.dtype and any(1 < q == n for q, n in lens)

    def _check_given(self, key: Tensor, value: Tensor) -> None:
        """Keys that are given whole: at least as many as the batch's sequences reach."""
        spec, dtype = self.group.spec, self.dtype
        tokens = max(key.shape[0], self.keys_reach)
        for name, tensor, size in (
            ("key", key, spec.head_size),
            ("value", value, spec.v_head_size),
        ):
            shape = (tokens, spec.num_kv_heads, size)
            if tensor.shape != shape or tensor.dtype is not dtype:
                raise bad_input(name, tensor, shape, dtype)

    def _check_missing(
        self, key: Tensor | None, value: Tensor | None, cache: KVCache | None, params: LayerParams
    ) -> None:
        if (key is None) != (value is None):
            raise BatchError("key and value come together, or both are None")
        if key is None and params.qkv_bias is not None:
            raise BatchError("qkv_bias is added to query, key and value alike; key is missing")
        if cache is None and not self.group.spec.cached:
            raise BatchError(f"{self.group.spec} keeps no cache; pass key and value")

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        params: LayerParams,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Store the new keys and values and attend. Writes `out` (and `lse`)."""
        self.check_blocks(cache)
        if self.transforms is not None:
            query, key, value = self._transformed(self.transforms, query, key, value, params)
        if params.rotate or params.qkv_bias is not None:
            query, key, value = self._prepare(query, key, value, cache, params)
        elif self.store is not None and key is not None:
            assert value is not None and cache is not None and self.stored_by is not None
            self.stored_by.run(self.store, key, value, cache, params)
        for call in self._calls:
            view = cache if call.block_size is None else call.view(cache)
            rows = call.rows
            if rows is None:
                call.backend.run(call.plan, query, key, value, view, params, out, lse)
            elif isinstance(rows, slice):
                call.backend.run(
                    call.plan, query[rows], self._own(key, rows), self._own(value, rows), view,
                    params, out[rows], _rows(lse, rows),
                )  # fmt: skip
            else:
                own = self._own(key, rows), self._own(value, rows)
                _run_gathered(call, rows, query, *own, view, params, out, lse)
        if self.transforms is not None:
            inputs = {**self.batch.inputs, **params.inputs}
            out.copy_(self.transforms.changed("output", out, self.query_places, inputs))

    def _own(self, keys: Tensor | None, rows: Rows) -> Tensor | None:
        """Return a call's new keys or values; what is given whole a plan finds by itself."""
        return _rows(keys, rows) if self.group.spec.cached else keys

    def _transformed(
        self,
        transforms: Transforms,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        params: LayerParams,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return queries, keys and values as the layer's variant changes them."""
        inputs, places = {**self.batch.inputs, **params.inputs}, self.query_places
        query = transforms.changed("query", query, places, inputs)
        if key is None or value is None:
            return query, key, value
        if not self.group.spec.cached:
            places = Places.of_keys(self.batch, self.keys_reach)
            key, value = key[: self.keys_reach], value[: self.keys_reach]
        return (
            query, transforms.changed("key", key, places, inputs),
            transforms.changed("value", value, places, inputs),
        )  # fmt: skip

    @cached_property
    def query_places(self) -> Places:
        """Where the step's tokens stand, for transforms."""
        return Places.of_queries(self.batch)


def _rows(tensor: Tensor | None, rows: Rows) -> Tensor | None:
    if tensor is None or tensor.dtype.itemsize > 1 or isinstance(rows, slice):
        return None if tensor is None else tensor[rows]
    return raw(tensor)[rows].view(tensor.dtype)


def _run_gathered(
    call: Call,
    rows: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None,
    params: LayerParams,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a call whose tokens don't lie side by side: copied together, and their results back.

    `key` and `value` are the call's own.
    """
    taken = _rows(query, rows)
    assert taken is not None
    part = out.new_empty(len(rows), *out.shape[1:])
    part_lse = None if lse is None else lse.new_empty(len(rows), lse.shape[1])
    call.backend.run(call.plan, taken, key, value, cache, params, part, part_lse)
    raw(out).index_copy_(0, rows, raw(part))
    if lse is not None and part_lse is not None:
        lse.index_copy_(0, rows, part_lse)


class Planner(StepPlanner):
    """Plans for attention over a cache, or over keys and values that are given."""

    def __init__(self, group: LayerGroup):
        self.group, self.spec = group, group.spec
        self.chooser = Chooser(group)
        self.sharing = Sharing.of(group)
        if self.spec.cached:
            self.store = group.backend("store", StoreBackend, cache=group.cache_format)
            self.rotated_by = claimed_rotation(group, self.store)

    @property
    def padding_rows(self) -> bool:
        """Whether all candidates claim them."""
        return not self.chooser.without_padding_rows

    def plan(self, batch: Batch, reuse: Any = None) -> AttentionStep:
        """Plan one step. Raises `BatchError`."""
        check_step_mask(self.spec, batch)
        before: dict[str, Call] = (
            {} if reuse is None else {call.phase: call for call in reuse.calls}
        )
        others: list[tuple[LayerSpec, Part]] = []  # what is another layer's: the spec's parts
        if not self.spec.cached:
            prefill = self.chooser.chosen["prefill"].info
            others = by_position(self.spec, batch)
            if others and before:
                raise BatchError("first_positions in a captured step; run such a step outside")
            whole = batch.num_tokens and not others
            assigned = [("prefill", prefill, Part(batch, None))] if whole else []
        else:
            self._check(batch)
            prompts, rest = whole_prompts(self.spec, batch)
            assigned = self._assigned(batch, rest)
            if prompts is not None:  # which see all their keys (`LayerSpec.dense_context`)
                others = [(dense(self.spec), prompts)]
        if before and {phase for phase, _, _ in assigned} - before.keys():
            raise BatchError(
                f"the captured step has phases {sorted(before)}, this one {[a[0] for a in assigned]}; "
                "capture a graph for each kind of step"
            )
        calls = tuple(
            (phase == "decode" and self.sharing.call(part.batch, part.rows, before.get(phase)))
            or self._call(phase, info, part, before)
            for phase, info, part in assigned
        )
        calls = (*calls, *(self._of_another(spec, part) for spec, part in others))
        step = AttentionStep(self.group, batch, calls)
        if self.spec.cached and batch.slot_mapping is not None:
            step.store, step.stored_by = self.store.plan(batch.slot_mapping), self.store
            step.rotated_by = self.rotated_by
        if self.spec.rope is not None:
            step.rotation = rotation_of(self.spec, batch, None if reuse is None else reuse.rotation)
            if not self.spec.cached:
                step.key_rotation = key_rotation_of(self.spec, batch)
        return step

    def _assigned(self, batch: Batch, rest: Part | None) -> list[Assignment]:
        """Return who runs what: of the whole step, or of what its whole prompts leave."""
        if rest is None:
            return self.chooser.assign(batch) if batch.num_tokens else []
        if not rest.batch.num_tokens:
            return []
        return [
            (phase, info, Part(part.batch, rows_within(rest, part)))
            for phase, info, part in self.chooser.assign(rest.batch)
        ]

    def _of_another(self, spec: LayerSpec, part: Part) -> Call:
        """Return the call of a part that is a layer without some of this one's limits."""
        info = self.chooser.chosen["prefill"].info
        form = self.group.kernel_format(info)
        backend = self.group.load("prefill", info, AttentionBackend, spec, form)
        return self._planned("prefill", info.name, backend, part, None)

    def _call(self, phase: str, info: BackendInfo, part: Part, before: dict[str, Call]) -> Call:
        earlier = before.get(phase)
        # Under a captured graph the capture's choice holds.
        name = info.name if earlier is None else earlier.name
        return self._planned(phase, name, self.chooser.find(phase, name).backend, part, earlier)

    def _planned(
        self, phase: str, name: str, backend: AttentionBackend, part: Part, earlier: Call | None
    ) -> Call:
        if part.batch.shared_prefix is not None:  # nobody reads once what `sharing` didn't ask for
            part = Part(part.batch.with_shared_prefix(None), part.rows)
        return planned_call(self.group.cache_format, phase, name, backend, part, earlier)

    def note(self, step: StepPlan, call: Call) -> str:
        return self.sharing.note(step.batch, call)

    def _check(self, batch: Batch) -> None:
        if self.spec.causal:
            check_padding(batch, self.chooser.without_padding_rows)
        assert self.group.cache_format is not None
        check_pages(self.spec, batch, self.group.cache_format.block_size)
