"""Runs a store or a merge alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyattn.conformance.harness.base import Harness
from polyattn.runtime.backend import MergeBackend, StoreBackend
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.cache.scales import input_dtype, of_heads
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.program import LayerParams, StorePlan
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import is_rows, rows_of
from polyattn.workload.pages import alike, bits, copied, poison, put, unchanged

ROWS_OF = (2.0**-140, 1e-20, 1e4, 1e30)
"""What a step's first rows are as large as, where rows of bytes are stored: denormals, what saturates."""
COUNTS = {"some": 97, "all skipped": 5, "none": 0, "one": 1, "many": 3000}


@dataclass
class NewTokens:
    """One layer's keys and values of one step, to store."""

    key: Tensor
    value: Tensor
    slots: Tensor
    cache: KVCache
    params: LayerParams


class StoreHarness(Harness):
    """Builds caches and stores into them."""

    def store(self, spec: LayerSpec, layout: str | None = None) -> tuple[LayerGroup, StoreBackend]:
        """Return a group and its store."""
        group = self.group(spec, layout)
        return group, group.store

    def tokens(
        self, group: LayerGroup, batch: str | int, like: NewTokens | None = None
    ) -> NewTokens:
        """Return strided keys and values, slots in no order, and a cache of NaN with old rows."""
        form, spec = group.cache_format, group.spec
        count = batch if isinstance(batch, int) else COUNTS[batch]
        assert form is not None
        cache = group.allocate_cache(-(-2 * count // form.block_size) + 3)
        poison(cache)
        key, value = self.rows(form, spec, count)
        room = cache.num_blocks * form.block_size
        slots = self.dice.order(room)[:count]
        if batch in ("some", "many") or isinstance(batch, int):
            slots[self.dice.chance(count) < 0.3] = -1
        if batch == "some":
            slots[0] = -1
        if batch == "all skipped":
            slots.fill_(-1)
        slots = slots.to(self.torch_device) if like is None else like.slots
        return NewTokens(key, value, slots, cache, self.params(form, spec))

    def rows(self, form: CacheFormat, spec: LayerSpec, count: int) -> tuple[Tensor, Tensor]:
        """Return strided keys and values, now and then beyond what 8 bits hold: those saturate."""
        heads = form.num_kv_heads
        fused = self.dice.normal(count, 3 * heads, max(form.head_size, form.v_head_size))
        fused *= torch.where(self.dice.normal(count, 1, 1) > 1.5, 2000.0, 1.0)
        fused = fused.clamp(-448.0, 448.0) if spec.qkv_dtype != "auto" else fused
        if is_rows(spec.kv_cache_dtype) and spec.qkv_dtype == "auto":
            for at, extreme in zip(range(count), (0.0, *ROWS_OF), strict=False):
                fused[at] *= extreme
            fused[len(ROWS_OF) + 1 : len(ROWS_OF) + 2, ..., 3] = torch.nan
        fused = fused.to(input_dtype(spec))
        key = fused[:, :heads, : form.head_size]
        if form.value_in_key:
            return key, key[..., : form.v_head_size]
        return key, fused[:, heads : 2 * heads, : form.v_head_size]

    def params(self, form: CacheFormat, spec: LayerSpec) -> LayerParams:
        """Return scales for a cache that is quantised, 1 for one that isn't."""
        if spec.kv_cache_dtype == "auto":
            return LayerParams()
        count = form.num_kv_heads if spec.scales == "head" else 1
        drawn = [0.05 + 0.01 * n for n in self.dice.integers(0, 10, count)]
        if spec.scales == "number":
            scale = drawn[0]
            return LayerParams(k_scale=scale, v_scale=scale if form.value_in_key else scale * 1.5)
        each = torch.tensor(drawn, device=self.torch_device).expand(form.num_kv_heads)
        return LayerParams(k_scale=each, v_scale=each * 1.5)

    def check(
        self, store: StoreBackend, new: NewTokens, plan: StorePlan | None = None, label: str = ""
    ) -> None:
        """Store and look at every slot of the cache: those of the step, and all others."""
        held, before = copied(new.cache), (new.key.clone(), new.value.clone())
        put(held, new.key, new.value, new.slots, (new.params.k_scale, new.params.v_scale))
        store.run(plan or store.plan(new.slots), new.key, new.value, new.cache, new.params)
        unchanged("key", new.key, before[0])
        unchanged("value", new.value, before[1])
        self.compare(new, held, label)

    def compare(self, new: NewTokens, held: KVCache, label: str = "") -> None:
        """Assert that `new.cache` has the right values, or equally near ones after rounding."""
        scales = (new.params.k_scale, new.params.v_scale)
        for name, fresh, scale in (("key", new.key, scales[0]), ("value", new.value, scales[1])):
            stored, wanted = getattr(new.cache, name), getattr(held, name)
            wrong = bits(stored) != bits(wanted)
            if not wrong.any():
                continue
            has_slot = new.slots >= 0
            at = (
                new.slots[has_slot] // new.cache.block_size,
                new.slots[has_slot] % new.cache.block_size,
            )
            elsewhere = wrong.clone()
            elsewhere[at] = False
            assert not elsewhere.any(), f"{label}{self.backend} wrote a {name} where no slot is"
            if stored.dtype == torch.uint8:  # rows of bytes have one valid rounding
                if name == "value" and new.cache.value_in_key:
                    continue  # it is the key's
                format = rows_of(new.cache.format.dtype)[name == "value"]
                right = alike(stored[at], wanted[at], format, fresh.shape[2])
                assert bool(right.all()), f"{label}{self.backend} stored a {name} wrong"
                continue
            assert stored.dtype.itemsize == 1, f"{label}{self.backend} stored a {name} wrong"
            # What is quantised may round another way only where both are as near; no 8-bit integer
            # says NaN, and of an 8-bit float's NaNs any does.
            exact = fresh[has_slot].double() / of_heads(scale, fresh.shape[1])
            error = (stored[at].double() - exact).abs()
            best = (wanted[at].double() - exact).abs()
            near = (error <= best + 1e-6 * exact.abs()) | exact.isnan()
            assert bool(near.all()), f"{label}{self.backend} rounded a {name} wrong"


class MergeHarness(Harness):
    """Merges random states."""

    def merge(self, spec: LayerSpec) -> MergeBackend:
        """Return the merge of a group for this layer."""
        return self.group(spec).backend("merge", MergeBackend)

    def states(self, spec: LayerSpec, parts: int, tokens: int = 40) -> list[tuple[Tensor, Tensor]]:
        """Return (output, LSE) of several parts; some rows saw no key in some, or in any."""
        dtype = STORAGE_DTYPES[spec.dtype]
        parts_of = []
        for index in range(parts):
            out = self.dice.normal(tokens, spec.num_heads, spec.v_head_size, dtype=dtype)
            lse = self.dice.normal(tokens, spec.num_heads) * 3.0
            lse[5:10] += 80.0  # whose exponential is no float32
            lse[10:15] -= 200.0 * index
            none = self.dice.chance(*lse.shape).to(lse.device) < 0.2
            none[:3], none[3] = True, index == 0
            none[4] = index > 0
            lse.masked_fill_(none, -torch.inf)
            out.masked_fill_(none[..., None], 0.0)
            parts_of.append((out, lse))
        return parts_of
