"""How is a step of attention planned? By phase: each part to its backend, whose plan it keeps.

A part runs on the chosen backend, or where times were measured, on the fastest predicted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Size, Tensor

from polyattn.device import Device
from polyattn.errors import BatchError
from polyattn.families.attention.fused import in_heads, keys_in_heads, out_in_heads
from polyattn.families.attention.rotation import key_rotation_of, rotation_of
from polyattn.families.attention.sharing import Sharing
from polyattn.families.attention.text_positions import by_position
from polyattn.families.attention.transforms import Places, Transforms
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import input_dtype, output_dtype
from polyattn.runtime.decompositions import (
    Part,
    by_phase,
    planned_call,
    refill_call,
    rows_within,
    whole_prompts,
)
from polyattn.runtime.group import LayerGroup, StepPlan, StepPlanner
from polyattn.runtime.inputs import (
    bad_input,
    check_apart,
    check_tensor,
    in_forward_mode,
    refuse_gradients,
)
from polyattn.runtime.program import Call, Frame, LayerParams, Op
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.store import Store, claimed_rotation
from polyattn.selection.prediction import LONGEST_SHORT
from polyattn.selection.step_choice import ALL, DECODES, REST, StepChoice
from polyattn.spec.decompose import dense
from polyattn.spec.layer import LayerSpec

Assignment = tuple[str, BackendInfo, Part]
"""A phase, the backend that runs it, and its part of the step."""


@dataclass(frozen=True)
class Candidate:
    """A backend that may run a step over the group's cache."""

    info: BackendInfo
    backend: AttentionBackend


class Chooser:
    """Assigns a step's parts to backends, all of them loaded before the first step.

    A candidate that is still being built competes once it is ready, for plans that are made after that.

    Without measured times that is the selection's pair. With them, every candidate competes that has a
    model for the kind of step. Other steps stay with the pair.
    """

    def __init__(self, group: LayerGroup, phases: Sequence[str] = ("prefill", "decode")):
        """Load the candidates of these phases; another planner serves the other phases."""
        selection = group.selection
        # Planned by bounds, decodes are a call of their own, and lengths predict no time.
        self.bounded = group.spec.length_bounds
        models = selection.timings
        known = {model.backend for model in models}
        self.phases: dict[str, dict[str, Candidate]] = {"prefill": {}, "decode": {}}
        self.chosen: dict[str, Candidate] = {}
        candidates = dict(selection.candidates)
        for phase in phases:
            members, info = self.phases[phase], selection.backend(phase)
            if info is None:
                continue
            # Keys that are passed whole go to the selected backend at every step.
            others = candidates.get(phase, ()) if group.spec.cached else ()
            for other in (info, *(c for c in others if c.name in known)):
                if other.name not in members:
                    loaded: AttentionBackend | None
                    if other is info:
                        loaded = group.backend(
                            phase, AttentionBackend, cache=group.kernel_format(info)
                        )
                    else:
                        loaded = group.candidate(phase, other, AttentionBackend, later=True)
                    if loaded is not None:
                        members[other.name] = Candidate(other, loaded)
            self.chosen[phase] = members[info.name]
        everyone = [c.info for members in self.phases.values() for c in members.values()]
        self.longest_decode = 1
        if "decode" in self.chosen:
            claims = self.chosen["decode"].info.capabilities
            self.longest_decode = claims.decode_query_lens
        # Backends that may run a step and take padding rows of one query token only.
        self.without_padding_rows = [i.name for i in everyone if not i.capabilities.padding_rows]
        decode = self.chosen.get("decode")
        self.mixes = decode is not None and _mixes(decode.info, group.spec, group.device)
        self.group, self.models = group, models
        self._by_time: StepChoice | None = None
        self._joined = -1

    @property
    def by_time(self) -> StepChoice | None:
        """The choice among the candidates that are built; None without times."""
        builds = self.group.builds
        if self.models and self._joined != builds.done:
            self._joined = builds.done
            infos = {
                p: {n: c.info for n, c in m.items() if builds.ready(c.backend)}
                for p, m in self.phases.items()
            }
            chosen = {phase: c.info.name for phase, c in self.chosen.items()}
            self._by_time = StepChoice(self.group.spec, self.models, infos, chosen)
        return self._by_time

    def decode(self, batch: Batch) -> Candidate:
        """Return what runs rows of one token, or of as few as the selection's decode serves."""
        by_time, usual = self.by_time if self.models else None, self.chosen["decode"]
        if by_time is None or self.bounded or batch.max_query_len > LONGEST_SHORT:
            return usual
        if batch.all_decode:
            return self.phases["decode"][by_time.decode(batch.host_lens, batch.max_seq_len)]
        (call,) = by_time.calls(batch.host_query_lens, batch.host_lens)
        return self.phases["decode"][call.name]

    def assign(self, batch: Batch) -> list[Assignment]:
        """Return which backend runs which part of a step over a cache."""
        by_time = self.by_time if self.models else None
        if by_time is None or self.bounded or batch.num_contexts is not None:
            return self._by_priority(batch)
        if batch.all_decode:
            name = by_time.decode(batch.host_lens, batch.max_seq_len)
            return [("decode", self.phases["decode"][name].info, Part(batch, None))]
        calls = by_time.calls(batch.host_query_lens, batch.host_lens)
        parts: dict[str, Part | None] = {ALL: Part(batch, None)}
        if len(calls) > 1:
            phases = by_phase(batch)
            parts = {DECODES: phases.decode, REST: phases.prefill}
        assignments: list[Assignment] = []
        for call in calls:
            part = parts[call.rows]
            assert part is not None, f"{call.rows} of {batch}"
            assignments.append((call.phase, self.phases[call.phase][call.name].info, part))
        return assignments

    def _by_priority(self, batch: Batch) -> list[Assignment]:
        prefill, decode = self.chosen["prefill"], self.chosen["decode"]
        apart = batch.num_contexts is not None or batch.all_decode or self.bounded
        whole = self.mixes and not apart
        if prefill.info == decode.info and whole:
            return [("prefill", prefill.info, Part(batch, None))]
        phases = by_phase(batch, self.longest_decode)
        parts = [
            (phase, info, part)
            for phase, info, part in (
                ("decode", decode.info, phases.decode),
                ("prefill", prefill.info, phases.prefill),
            )
            if part is not None and part.batch.num_tokens
        ]
        if self.bounded and any(isinstance(part.rows, Tensor) for _, _, part in parts):
            # Gathered rows would have copies of lengths that only the device knows.
            return [("prefill", prefill.info, Part(batch, None))]
        return parts


def _mixes(info: BackendInfo, spec: LayerSpec, device: Device) -> bool:
    """Whether a backend takes a mixed step in one call where no times say which is faster.

    Not where it ranks its one call below its decode: such a call may cut no long row.
    """
    whole, decode = (info.priority(spec, device, phase).score for phase in ("mixed", "decode"))
    return "mixed" in info.capabilities.phases and whole >= decode


class TransformInputs(Op):
    """Queries, keys and values as the layer's variant changes them."""

    def __init__(
        self, transforms: Transforms, batch: Batch, places: Callable[[], Places], keys_reach: int
    ):
        self.transforms, self.batch = transforms, batch
        self.places, self.keys_reach = places, keys_reach

    def run(self, frame: Frame) -> None:
        changed, inputs = self.transforms.changed, {**self.batch.inputs, **frame.params.inputs}
        places, key, value = self.places(), frame.key, frame.value
        frame.query = changed("query", frame.query, places, inputs)
        if key is None or value is None:
            return
        if frame.cache is None:
            places = Places.of_keys(self.batch, self.keys_reach)
            key, value = key[: self.keys_reach], value[: self.keys_reach]
        frame.key = changed("key", key, places, inputs)
        frame.value = changed("value", value, places, inputs)


class TransformOutput(Op):
    """The output likewise, after all calls."""

    def __init__(self, transforms: Transforms, batch: Batch, places: Callable[[], Places]):
        self.transforms, self.batch, self.places = transforms, batch, places

    def run(self, frame: Frame) -> None:
        inputs = {**self.batch.inputs, **frame.params.inputs}
        frame.out.copy_(self.transforms.changed("output", frame.out, self.places(), inputs))


@lru_cache(maxsize=256)
def _shapes(tokens: int, heads: int, kv_heads: int, size: int, v_size: int) -> tuple[Size, ...]:
    """Return the shapes of so many tokens' queries, outputs, LSEs, keys and values."""
    whole = (heads, size), (heads, v_size), (heads,), (kv_heads, size), (kv_heads, v_size)
    return tuple(Size((tokens, *each)) for each in whole)


class AttentionStep(StepPlan):
    """What a step does, `before` its calls first, and the shapes that its layers are held to."""

    def __init__(self, planner: Planner, batch: Batch, before: Store, calls: Sequence[Call]):
        self.before, self.whole = before, all(call.rows is None for call in calls)
        group, spec, tokens = planner.group, planner.spec, batch.num_tokens
        ops: tuple[Op, ...] = (before, *calls)
        transforms = planner.transforms
        if transforms is not None:
            places = cache(lambda: Places.of_queries(batch))
            ops = (
                TransformInputs(transforms, batch, places, before.keys_reach),
                *ops,
                TransformOutput(transforms, batch, places),
            )
        super().__init__(group, batch, ops)
        self.device, self.device_type = group.torch_device, group.device_type
        shapes = _shapes(
            tokens, spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size
        )
        self.query_shape, self.out_shape, self.lse_shape = shapes[:3]
        self.dtype, self.out_dtype = planner.dtype, planner.out_dtype
        self._alike = planner.alike
        # The new tokens' keys and values, or None if keys are passed whole.
        self.key_shape: Size | None = shapes[3] if spec.cached else None
        self.value_shape: Size | None = shapes[4] if spec.cached else None

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
        """Check the arguments and run. Returns the output (`out`, if passed); writes `lse`.

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
        fresh = out is None
        if out is None:
            if self._alike and query.is_contiguous():  # which torch takes half the time for
                out = torch.empty_like(query)
            else:
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
            _check_strides(out)
        if key is not None and value is not None:
            key, value = self._checked(key, value)
        elif key is not None or value is not None or cache is None:
            self._check_missing(key, value, cache, params)
        # Kernels stride by tokens and heads. Tensors with gaps within a head are copied.
        if query.stride()[2] != 1:  # quicker than stride(2)
            query = query.contiguous()
        if (
            query.requires_grad
            or (key is not None and key.requires_grad)
            or (value is not None and value.requires_grad)
            or in_forward_mode()
        ):
            refuse_gradients(query=query, key=key, value=value)
        frame = Frame(query, key, value, cache, params, out, lse, None, fresh)
        if torch.is_autocast_enabled(self.device_type):
            with torch.autocast(self.device_type, enabled=False):
                self.run(frame)
        else:
            self.run(frame)
        return frame.out

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

    def _check_given(self, key: Tensor, value: Tensor) -> None:
        """Check keys that are passed whole: at least as many as the batch's sequences reach."""
        spec, dtype = self.group.spec, self.dtype
        tokens = max(key.shape[0], self.before.keys_reach)
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
            raise BatchError("qkv_bias is added to query, key and value; pass key and value")
        if cache is None and not self.group.spec.cached:
            raise BatchError(f"{self.group.spec} keeps no cache; pass key and value")


class Planner(StepPlanner):
    """Plans attention over a cache, or over keys and values that are passed whole."""

    def __init__(self, group: LayerGroup):
        self.group, self.spec = group, group.spec
        self.chooser = Chooser(group)
        self.sharing, self.transforms = Sharing.of(group), Transforms.of(self.spec)
        self.dtype, self.out_dtype = input_dtype(self.spec), output_dtype(self.spec)
        # Whether an output is like its query.
        self.alike = self.spec.v_head_size == self.spec.head_size and self.dtype is self.out_dtype
        self.store, self.rotated_by = None, None
        if self.spec.cached:
            self.store = group.store
            self.rotated_by = claimed_rotation(group, self.store)

    @property
    def padding_rows(self) -> bool:
        """Whether all candidates claim them."""
        return not self.chooser.without_padding_rows

    def check(self, batch: Batch) -> None:
        if self.group.cache_format is not None:
            if self.spec.causal:
                batch.check_queries(self.chooser.without_padding_rows)
            batch.check_pages(self.group.cache_format.block_size)

    def plan(self, batch: Batch) -> AttentionStep:
        read_back = self.sharing.looks and self.sharing.look(batch)
        others: list[tuple[LayerSpec, Part]] = []  # what is another layer's: the spec's parts
        if not self.spec.cached:
            prefill = self.chooser.chosen["prefill"].info
            others = by_position(self.spec, batch)
            whole = batch.num_tokens and not others
            assigned = [("prefill", prefill, Part(batch, None))] if whole else []
        else:
            prompts = rest = None
            if self.spec.dense_context:
                prompts, rest = whole_prompts(self.spec, batch)
            if rest is not None:
                assigned = self._of_rest(rest)
            else:
                assigned = self.chooser.assign(batch) if batch.num_tokens else []
            if prompts is not None:  # which see all their keys (`LayerSpec.dense_context`)
                others = [(dense(self.spec), prompts)]
        form, backends = self.group.cache_format, self.chooser.phases
        calls: list[Call] = []
        for phase, info, part in assigned:
            call = self.sharing.call(part.batch, part.rows) if phase == "decode" else None
            if call is None:
                backend = backends[phase][info.name].backend
                call = planned_call(form, phase, info.name, backend, part)
            calls.append(call)
        if read_back:
            self.sharing.learn(any(call.saved_bytes for call in calls))
        calls += [self._of_another(spec, part) for spec, part in others]
        rotation = key_rotation = None
        if self.spec.rope is not None:
            rotation = rotation_of(self.spec, batch)
            if not self.spec.cached:
                key_rotation = key_rotation_of(self.spec, batch)
        store = Store(
            self.spec, batch, self.store, self.rotated_by, rotation, key_rotation, keeps=True
        )
        return AttentionStep(self, batch, store, calls)

    def refill(self, step: AttentionStep, batch: Batch) -> None:
        if batch.first_positions is not None:
            raise BatchError("first_positions can't be captured; run such a step eagerly")
        if self.spec.dense_context and whole_prompts(self.spec, batch)[0]:
            raise BatchError(
                f"dense_context=True: {batch} has whole prompts, whose calls no graph has; run it eagerly"
            )
        phases = None if step.whole else by_phase(batch, self.chooser.longest_decode)
        for call in step.calls:
            rows = batch if phases is None else phases.of(call)
            if call.plan.batch.shared_prefix is None:
                refill_call(self.group.cache_format, call, rows)
            else:
                self.sharing.refill(call, rows)
        if self.spec.rope is not None:
            rotation_of(self.spec, batch, step.before.rotation)

    def reads_tensors(self, step: AttentionStep) -> bool:
        if step.before.rotation is not None:
            return True
        return any(call.backend.reads_tensors or call.block_size for call in step.calls)

    def _of_rest(self, rest: Part) -> list[Assignment]:
        """Return the calls for the rows that a step's whole prompts leave."""
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
        return planned_call(self.group.cache_format, "prefill", info.name, backend, part)

    def note(self, step: StepPlan, call: Call) -> str:
        return self.sharing.note(step.batch, call)


def _check_strides(out: Tensor) -> None:
    if out.stride()[2] != 1:
        raise BatchError(f"out has strides {out.stride()}; its last one must be 1")
    check_apart(out)
