"""Which class runs attention? `Attention`, one layer; layers of one group share plans and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn.errors import BatchError
from polyattn.families.attention.alibi import alibi_slopes as default_slopes
from polyattn.families.attention.fused import (
    fused_bias,
    in_heads,
    keys_in_heads,
    norm_weights,
    out_in_heads,
)
from polyattn.families.attention.planning import AttentionStep
from polyattn.families.attention.rotation import check_rotate, rotated_here
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import LayerScales, Scale, input_dtype, used_scales
from polyattn.runtime.functions.pointwise import check_step_inputs, layer_inputs
from polyattn.runtime.graphs import torch_compile
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import (
    capturing,
    check_aligned,
    check_apart,
    check_is_real,
    check_tensor,
    compiling,
)
from polyattn.runtime.layer import Layer, Output
from polyattn.runtime.parameters import Weight
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_on_device
from polyattn.runtime.store import store_rows
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec


class Attention(Layer):
    """One attention layer on the selected backends. Forward only: it refuses gradients.

    Layers of one `LayerGroup` share plans and kernels. A layer that is made from a `Selection` or a
    `LayerSpec` has a group of its own. From a spec, it selects on this machine, and verifies on an
    accelerator.

    The layer references tensors and doesn't copy them: what is loaded into one afterwards counts, also
    for a layer that was made on the meta device. After a parameter was replaced, assign the new one:
    `layer.sinks.tensor = parameter`.

    Args:
        group: the group, or the selection or the spec to make one.
        sinks: (num_heads,), learned sink logits, if the spec has them. A backend may round them to the
            layer's dtype.
        alibi_slopes: (num_heads,); default: the paper's, of a layer that has all of its model's heads.
        k_scale: a quantised cache holds `key / scale`. A number; if the spec's `scales` are tensors
            also a tensor () or, with `"head"`, (num_kv_heads,). Scales may be assigned: `layer.k_scale
            = 0.02`.
        v_scale: a quantised cache holds `value / scale`; as `k_scale`.
        q_scale: of queries that arrive quantised; as `k_scale`.
        out_scale: of an output that leaves quantised; as `k_scale`.
        rotate: required if the spec has a `rope`. True: this layer rotates queries and keys, at the
            batch's positions; False: the caller did.
        qkv_bias: (num_heads * size + num_kv_heads * size + num_kv_heads * v_head_size,), added to
            query, key and value before they are rotated.
        q_norm: (head_size,), or (num_heads * head_size,) of a norm over tokens: the weight of the spec's
            `qk_norm`, which this layer then applies before it rotates. With rotate=False the caller did.
        k_norm: as `q_norm`, of the keys; None for a layer that reads another's.
        inputs: of the spec's variant, by name, those that don't come with each batch: tensors or
            numbers.
        checks: check block tables and slots on the device at each step; None: the setting `checks`.
        own_keys: False: the layer reads another's cache (`LayerSpec.kv_source`), and refuses a key and
            a value, which would overwrite it.

    Raises:
        SpecError: an argument doesn't fit the spec.
        SelectionError, PluginError: as `LayerGroup`.

    Examples:
        >>> layer = Attention(LayerSpec(num_heads=4, head_size=64, dtype="float32", block_size=16))
        >>> cache, table = layer.group.allocate_cache(2), torch.tensor([[1]], dtype=torch.int32)
        >>> plan = layer.group.plan(Batch.from_lens([3], [3], table, block_size=16))
        >>> layer(*torch.randn(3, 3, 4, 64), cache, plan).shape
        torch.Size([3, 4, 64])

    """

    family = "attention"

    def __init__(
        self,
        group: LayerGroup | Selection | LayerSpec,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        q_scale: Scale = 1.0,
        out_scale: Scale = 1.0,
        rotate: bool | None = None,
        qkv_bias: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        inputs: Mapping[str, Any] | None = None,
        checks: bool | None = None,
        own_keys: bool = True,
    ):
        super().__init__(group, checks, own_keys)
        spec = self.spec
        self.default_slopes = spec.alibi and alibi_slopes is None
        if spec.alibi and alibi_slopes is None:
            alibi_slopes = default_slopes(spec.num_heads)
        device = self.group.torch_device
        self.sinks = Weight.per_head("sinks", sinks, spec, spec.learned_sinks, device)
        self.alibi_slopes = Weight.per_head("alibi_slopes", alibi_slopes, spec, spec.alibi, device)
        self.qkv_bias = fused_bias(qkv_bias, spec, device)
        norms = norm_weights(spec, {"q_norm": q_norm, "k_norm": k_norm}, rotate, device)
        self.q_norm, self.k_norm = norms.get("q_norm"), norms.get("k_norm")
        self.inputs, self._from_step = layer_inputs(spec, inputs, device)
        self.scales = LayerScales(
            spec,
            device,
            {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "out_scale": out_scale},
        )
        self._params = LayerParams(rotate=rotated_here(spec, check_rotate(spec, rotate)))
        for name, number in self.scales.numbers.items():
            setattr(self._params, name, number)
        self._weights = {
            name: weight
            for name in ("sinks", "alibi_slopes", "qkv_bias", "q_norm", "k_norm")
            if (weight := getattr(self, name)) is not None
        }
        # Whether kernels read tensors of the layer's, which may be others at each call.
        self._reads = bool(self._weights or self.inputs or self.scales.tensors)
        # Whether a captured graph would keep a scale that is replaced later.
        self._seals = bool(spec.graph_capture and used_scales(spec))
        self._dtype, self._needs_lse = input_dtype(spec), spec.needs_lse

    @property
    def params(self) -> LayerParams:
        """The parameters that kernels get: the layer's scales, and its current sinks and slopes."""
        params = self._params
        if self._reads:
            for name, read in (*self._weights.items(), *self.scales.tensors.items()):
                setattr(params, name, read.current())
            for name, weight in self.inputs.items():
                params.inputs[name] = weight.current()
        return params

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LayerScales.NAMES:
            self.scales.set(name, value)
            if self.scales.numbers:
                setattr(self._params, name, self.scales.numbers[name])
            return
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in LayerScales.NAMES:
            return self.scales.get(name)
        return super().__getattr__(name)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None = None,
        plan: StepPlan | Batch | None = None,
        *,
        out: Tensor | None = None,
    ) -> Output:
        """Store the step's keys and values in `cache` and attend.

        Args:
            query: (num_tokens, num_heads, head_size) or (num_tokens, num_heads * head_size). A fused
                one, (num_tokens, num_heads * head_size + num_kv_heads * (head_size + v_head_size)),
                holds all three.
            key: (num_tokens, num_kv_heads, head_size), or in two dimensions; None: the cache holds the
                keys already (cross-attention).
            value: as `key`, with the values' size.
            cache: the layer's cache; None for a layer without one, whose key and value are all its
                keys.
            plan: of this layer's group, or the `Batch`, which then keeps the plan for the group's other
                layers.
            out: (num_tokens, num_heads, v_head_size), or in two dimensions: it is written and returned.

        Returns:
            The output (num_tokens, num_heads, v_head_size). If the spec has `needs_lse`, also the LSE,
            float32 (num_tokens, num_heads), natural logarithm.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        if compiling():
            return self._traced(query, key, value, cache, plan, out)
        step: Any = plan
        if step.__class__ is not AttentionStep or step.group is not self.group:
            step = self.group.plan_for(plan)
        lse = None
        if self._needs_lse:
            check_tensor("query", query, step.device)
            lse = query.new_empty(step.lse_shape, dtype=torch.float32)
        if cache is not self._known_cache or self.checks or self._from_step or not self.own_keys:
            self._check(step, query, key, value, cache, out)
        params = self.params if self._reads else self._params
        try:
            out = step.call(query, key, value, cache, params, out, lse)
        except RuntimeError:  # torch's own words on a tensor that has no address
            check_is_real("query", query)
            raise
        if self._seals and capturing(query):
            self.scales.captured = True
        return out if lse is None else (out, lse)

    if TYPE_CHECKING:
        __call__ = forward

    def output_shape(self, tokens: int) -> tuple[int, ...]:
        return tokens, self.spec.num_heads, self.spec.v_head_size

    def run(
        self,
        step: AttentionStep,
        inputs: Sequence[Tensor | None],
        cache: KVCache | None,
        out: Tensor,
        lse: Tensor | None = None,
        fresh: bool = False,
    ) -> Tensor:
        query, key, value = inputs
        assert query is not None
        self._check(step, query, key, value, cache, out)
        step.call(query, key, value, cache, self.params, out, lse)
        if self._seals and capturing(query):
            self.scales.captured = True
        return out

    def _traced(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        plan: StepPlan | Batch | None,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward` inside `torch.compile`."""
        heads, rows = in_heads(self.spec, query, key, value), out is not None and out.dim() == 2
        view = out_in_heads(self.spec, out) if rows and out is not None else out
        result = torch_compile.traced(self, heads, cache, plan, view)
        if not rows or out is None:
            return result
        return (out, result[1]) if self._needs_lse else out

    def store(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store keys and values without attending: an encoder's, for cross-attention.

        Args:
            key: (tokens, num_kv_heads, head_size), any number of tokens, or in two dimensions.
            value: as `key`, with the values' size.
            cache: the layer's cache.
            slot_mapping: int64 (tokens,), where each goes; -1 skips.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.
            CacheError: the cache doesn't fit the layer; nothing has changed.

        """
        if not self.spec.cached:
            raise BatchError(f"{self.spec} keeps no cache; there is nothing to store into")
        self.refuse_keys(key)
        params = self.params
        if params.rotate or params.qkv_bias is not None or params.q_norm is not None:
            raise BatchError(
                "store() writes keys and values as they are, and this layer norms, rotates or adds a "
                "bias; pass them to forward, or build a layer with rotate=False and without qkv_bias"
            )
        for name, tensor in (("key", key), ("value", value)):
            if tensor.__class__ is not Tensor:
                check_tensor(name, tensor, self.group.torch_device)
        if key.dim() == 2 or value.dim() == 2:
            key, value = keys_in_heads(self.spec, key, value)
        seen = cache is self._known_cache
        try:
            store_rows(self.group, key, value, cache, slot_mapping, params, self._dtype, seen)
        except RuntimeError:  # as in `forward`
            check_is_real("key", key)
            raise
        if not seen:
            self._known_cache = cache

    def _check(
        self,
        step: AttentionStep,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: KVCache | None,
        out: Tensor | None,
    ) -> None:
        """Check what the step doesn't: the cache's form, inputs, addresses, values."""
        if cache is not self._known_cache or self.checks:
            check_tensor("query", query, step.device)
            if isinstance(out, Tensor):
                check_apart(out, query=query, key=key, value=value)
        if cache is not self._known_cache:
            self._check_cache(cache)
            self._known_cache = cache
        if not self.own_keys:
            check_tensor("query", query, step.device)
            self.refuse_keys(in_heads(self.spec, query, key, value)[1])  # a fused query's, too
        if self._from_step:
            check_step_inputs(self.spec, self._from_step, step.batch)
        if not self.checks:
            return
        if self.group.device.is_accelerator:
            check_aligned(query=query, key=key, value=value, out=out)
        if cache is not None and not capturing(query):
            check_on_device(step.batch, cache.num_blocks, cache.block_size)

    def _check_cache(self, cache: KVCache | None) -> None:
        if cache is not None:
            self.group.check_cache(cache)
        elif self.spec.cached:
            raise BatchError(f"{self.spec} attends over a cache; pass cache=")
