"""Runs a store that rotates: a fused QKV tensor at positions in no order, looked at in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.conformance.harness.services import StoreHarness
from polyattn.families.attention.rope import query_temperature, rotate
from polyattn.families.attention.rotation import rotation_of
from polyattn.runtime.backend import StoreBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache, quantize
from polyattn.runtime.cache.scales import Scale, of_heads
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.program import LayerParams, StorePlan
from polyattn.runtime.rotation import NewTokens, Norms, Rotation
from polyattn.runtime.step.batch import Batch
from polyattn.spec.layer import LayerSpec
from polyattn.workload.pages import bits, unchanged

FARTHEST = 100_000
"""Positions are below; float32 angles there would be off by a hundredth."""


@dataclass
class RotatedTokens:
    """A step's new tokens, where they stand in their texts, and the cache that they go to."""

    new: NewTokens
    positions: Tensor
    slots: Tensor
    rotation: Rotation | None
    cache: KVCache
    params: LayerParams


class RotationHarness(StoreHarness):
    """Rotates and stores.

    `own_errors`: what float32 products and sums may add, of the largest element of a head.
    """

    own_errors = 3e-6

    def rotated(
        self, group: LayerGroup, batch: str, biased: bool, like: RotatedTokens | None = None
    ) -> RotatedTokens:
        """Return views of one fused tensor; `like`: another layer's tokens of the same step."""
        spec = group.spec
        base = self.tokens(group, batch)
        count, dtype = base.slots.shape[0], STORAGE_DTYPES[spec.dtype]
        parts = [(spec.num_heads, spec.head_size), base.key.shape[1:], base.value.shape[1:]]
        widths = [heads * size for heads, size in parts]
        fused = self.dice.normal(count, sum(widths) + 8, dtype=dtype)
        views = fused[:, : sum(widths)].split(widths, dim=1)
        query, key, value = (
            view.unflatten(1, tuple(part)) for view, part in zip(views, parts, strict=True)
        )
        key.copy_(base.key)  # some of it beyond what 8 bits hold
        if base.cache.value_in_key:
            value = key[..., : value.shape[2]]
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        bias = self.dice.normal(sum(widths), dtype=precise) if biased else None
        new = NewTokens(query, key, value, bias, self._norms(spec, precise))
        if like is not None:
            return RotatedTokens(
                new, like.positions, like.slots, like.rotation, base.cache, base.params
            )
        positions = torch.randint(FARTHEST, (count,), generator=self.dice.generator)
        positions = positions.to(self.torch_device)
        step = Batch(
            list(range(count + 1)), [1] * count, slot_mapping=base.slots, positions=positions
        )
        rotation = rotation_of(spec, step)
        return RotatedTokens(new, positions, base.slots, rotation, base.cache, base.params)

    def _norms(self, spec: LayerSpec, dtype: torch.dtype) -> Norms | None:
        """Return weights. Some of them make elements that overflow 8 bits."""
        norm = spec.qk_norm
        if norm is None:
            return None
        query, key = (
            self.dice.normal(spec.head_size * (heads if norm.over == "token" else 1), dtype=dtype)
            for heads in (spec.num_heads, spec.num_kv_heads)
        )
        for weight in (query, key):
            weight[::7] *= 50
        return Norms(query, key, norm.eps, norm.over)

    def check_rotated(
        self,
        store: StoreBackend,
        spec: LayerSpec,
        step: RotatedTokens,
        keep: bool,
        plan: StorePlan | None = None,
        label: str = "",
    ) -> None:
        """Rotate and store. Check the query, the stored keys and values, and every slot."""
        new, cache = step.new, step.cache
        assert new.key is not None and new.value is not None
        named = {"query": new.query, "key": new.key, "value": new.value, "bias": new.bias}
        if new.norms is not None:
            named |= {"q_norm": new.norms.query, "k_norm": new.norms.key}
        before = {n: t.clone() for n, t in named.items() if t is not None}
        held = cache.key.clone(), cache.value.clone()
        query, key, value = store.run_rotated(
            plan or store.plan(step.slots), step.rotation, new, cache, step.params, keep
        )
        for name, then in before.items():
            unchanged(name, named[name], then)
        exact = self._exact(spec, step)
        dtype = new.query.dtype
        self.near(f"{label}query", query, exact["query"], dtype, 1.0)
        if keep:
            assert key is not None and value is not None, f"{self.backend} kept no keys"
            self.near(f"{label}kept key", key, exact["key"], dtype, 1.0)
            self.near(f"{label}kept value", value, exact["value"], dtype, 1.0)
        has_slot = step.slots >= 0
        at = step.slots[has_slot] // cache.block_size, step.slots[has_slot] % cache.block_size
        scales = step.params.k_scale, step.params.v_scale
        for name, stored, was, scale in zip(
            ("key", "value"), (cache.key, cache.value), held, scales, strict=True
        ):
            wanted = exact[name][has_slot.cpu()]
            self.near(f"{label}stored {name}", stored[at], wanted, stored.dtype, scale)
            rest = bits(stored) != bits(was)
            rest[at] = False
            assert not rest.any(), f"{label}{self.backend} wrote a {name} where no slot is"

    def _exact(self, spec: LayerSpec, step: RotatedTokens) -> dict[str, Tensor]:
        new, rope = step.new, spec.rope
        assert new.key is not None and new.value is not None
        at, latent = step.positions.cpu(), spec.latent is not None
        parts = [x.cpu().double() for x in (new.query, new.key, new.value)]
        biases = new.biases()
        if biases is not None:
            parts = [x + bias.cpu().double() for x, bias in zip(parts, biases, strict=True)]
        query, key = parts[:2]
        if (norms := new.norms) is not None:
            query, key = (
                _normed(x, weight, norms) for x, weight in ((query, norms.query), (key, norms.key))
            )
        if rope is not None:
            query, key = (
                rotate(x, at, rope, offset=x.shape[2] - rope.span if latent or rope.last else 0)
                for x in (query, key)
            )
            query = query * query_temperature(rope, at)[:, None, None]
        value = key[..., : parts[2].shape[2]] if latent else parts[2]
        return {"query": query, "key": key, "value": value}

    def near(
        self, name: str, result: Tensor, exact: Tensor, dtype: torch.dtype, scale: Scale
    ) -> None:
        """Assert that numbers differ from the exact ones by rounding and the kernel's own error."""
        assert result.shape == exact.shape and result.dtype == dtype, f"{name} is {result.dtype}"
        if not exact.numel():
            return
        own = self.own_errors if dtype != torch.float64 else 1e-14
        factor = of_heads(scale, exact.shape[1])
        exact = exact / (factor.cpu().double() if isinstance(factor, Tensor) else factor)
        # Relative to the head before saturation, because saturated numbers had the same error.
        largest = exact.abs().amax(-1, keepdim=True)
        if dtype.itemsize == 1:
            limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
            exact = exact.clamp(-limit, limit)
            best = quantize(exact.float(), dtype, 1.0).double()
        else:
            best = exact.to(dtype).double()
        excess = (result.cpu().double() - exact).abs() - (best - exact).abs()
        wrong = excess > own * largest
        assert not wrong.any(), (
            f"{self.backend}: {name} is wrong, first for token {int(wrong.nonzero()[0, 0])}: "
            f"{float((excess / largest)[wrong].max()):.2g} of its head's largest further off than "
            f"{dtype} has to be, {own:g} is allowed"
        )


def _normed(x: Tensor, weight: Tensor | None, norms: Norms) -> Tensor:
    """Return x (tokens, heads, size) as the formula norms it, in float64."""
    assert weight is not None
    axes = (2,) if norms.over == "head" else (1, 2)
    root = torch.sqrt((x * x).mean(axes, keepdim=True) + norms.eps)
    return (
        x / root * weight.cpu().double().view(*((1, -1) if norms.over == "head" else x.shape[1:]))
    )
