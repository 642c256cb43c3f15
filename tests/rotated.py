"""Does a store rotate, quantise and place what the float64 formulas say? Every slot is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from polyattn.device import Device
from polyattn.families.attention.rope import query_temperature, rotate
from polyattn.families.attention.rotation import rotation_of
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES, KVCache
from polyattn.runtime.program import LayerParams
from polyattn.runtime.rotation import NewTokens, Norms
from polyattn.runtime.step.batch import Batch
from polyattn.selection.cache_format import CacheFormat
from polyattn.spec.kinds import AttentionKind
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import NormSpec
from polyattn.spec.rope import RopeSpec

SLOTS = torch.tensor([5, -1, 0, 33, -1, 17, 47])
POSITIONS = torch.tensor([0, 3, 1, 70000, 9, 511, 4096])
CPU = Device("cpu", "x86_64", torch_device="cpu")
BIG = 1e4
"""Beyond what 8 bits hold at the scales here."""


def rope(**changes: Any) -> RopeSpec:
    return RopeSpec(**({"rotary_size": 24, "base": 500.0, "attention_factor": 1.25} | changes))


def specs(
    dtypes: tuple[str, ...], stored: tuple[str, ...]
) -> Iterator[tuple[str, LayerSpec, str, bool]]:
    """Yield (label, spec, layout, biased): each way once with each dtype, not each with each."""
    base = LayerSpec(num_heads=6, num_kv_heads=3, head_size=24, dtype=dtypes[0], rope=rope())
    latent = LatentSpec(rank=16, rope_head_size=8)
    mla = LayerSpec(
        kind=AttentionKind.MLA, num_heads=3, head_size=20, v_head_size=12, latent=latent,
        dtype=dtypes[0], rope=rope(rotary_size=8),
    )  # fmt: skip
    warm = {"temperature": 0.1, "temperature_length": 100}
    ways: list[tuple[str, LayerSpec, str, bool]] = [
        ("whole", base, "NHD", False),
        ("whole HND", base, "HND", True),
        ("part", base.replace(rope=rope(rotary_size=8)), "NHD", True),
        ("part of six", base.replace(rope=rope(rotary_size=6)), "HND", False),
        ("odd values", base.replace(v_head_size=10, rope=rope(rotary_size=12)), "NHD", True),
        ("one head", base.replace(num_heads=1, num_kv_heads=1), "NHD", True),
        (
            "warm, clockwise",
            base.replace(rope=rope(**warm, temperature_power=0.2, clockwise=True)),
            "NHD",
            False,
        ),
        ("temperature alone", base.replace(rope=rope(rotary_size=0, **warm)), "NHD", True),
        ("latent", mla, "NHD", False),
        ("normed", base.replace(qk_norm=NormSpec(eps=0.1)), "HND", True),
        (
            "normed tokens",
            base.replace(qk_norm=NormSpec(over="token"), rope=rope(rotary_size=8)),
            "NHD",
            True,
        ),
    ]
    for label, spec, layout, biased in ways:
        assert spec.rope is not None
        for pairing in ("neox", "gptj") if spec.rope.rotary_size else ("neox",):
            turned = {f: getattr(spec.rope, f) for f in RopeSpec.__dataclass_fields__}
            made = spec.replace(rope=RopeSpec(**turned | {"pairing": pairing}))
            for dtype, form in itertools.product(dtypes, stored):
                yield (
                    f"{label}, {pairing}, {dtype}, {form}",
                    made.replace(dtype=dtype, kv_cache_dtype=form), layout, biased,
                )  # fmt: skip


def check(run: Any, spec: LayerSpec, layout: str, biased: bool, keep: bool) -> None:
    """Run `run_rotated` (of a store, or core's) over a step and look at all that it wrote."""
    size = 8
    latent = spec.latent is not None
    heads, width = (1, spec.latent.size) if spec.latent else (spec.num_kv_heads, spec.head_size)
    v_width = spec.latent.rank if spec.latent else spec.v_head_size
    form = CacheFormat(
        block_size=size, num_kv_heads=heads, head_size=width, v_head_size=v_width,
        dtype=spec.stored_dtype, layout=layout, value_in_key=latent,
    )  # fmt: skip
    cache = KVCache.allocate(form, 6)
    for stored in (cache.key, cache.value):
        stored.view(torch.int8 if stored.dtype.itemsize == 1 else stored.dtype).fill_(7)
    dtype = STORAGE_DTYPES[spec.dtype]
    parts = (spec.num_heads * spec.head_size, heads * width, 0 if latent else heads * v_width)
    # Wider in memory than it is, so that tokens have strides; a batch whose positions were given.
    fused = (torch.randn(len(SLOTS), sum(parts) + 16) * 4).to(dtype)
    fused[2, :3], fused[2, parts[0] : parts[0] + 3] = BIG, BIG
    fused[1] = torch.nan  # a skipped token's
    query, key, value = fused[:, : sum(parts)].split(parts, 1)
    query, key = query.unflatten(1, (spec.num_heads, -1)), key.unflatten(1, (heads, width))
    value = key[..., :v_width] if latent else value.unflatten(1, (heads, v_width))
    bias = None
    if biased:
        bias = torch.randn(
            sum(parts), dtype=torch.float64 if dtype == torch.float64 else torch.float32
        )
    norms = None
    if (norm := spec.qk_norm) is not None:
        counts = [(count if norm.over == "token" else 1) for count in (spec.num_heads, heads)]
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        weights = [torch.randn(count * width, dtype=precise) for count in counts]
        norms = Norms(*weights, norm.eps, norm.over)
    new, before = NewTokens(query, key, value, bias, norms), fused.clone()
    starts = list(range(len(SLOTS) + 1))
    batch = Batch(starts, [1] * len(SLOTS), slot_mapping=SLOTS, positions=POSITIONS)
    quantised = spec.kv_cache_dtype != "auto"
    scale = {"int8": 0.3, "fp8_e4m3": 0.07, "fp8_e5m2": 0.01}.get(spec.kv_cache_dtype, 1.0)
    params = LayerParams(
        k_scale=scale, v_scale=scale if latent else 1.5 * scale if quantised else 1.0
    )
    store_plan, rotation = _plan(run, SLOTS), rotation_of(spec, batch)
    held = [stored.clone() for stored in (cache.key, cache.value)]
    found = run(store_plan, rotation, new, cache, params, keep)
    assert torch.equal(fused.view(torch.uint8), before.view(torch.uint8)), "an input was changed"
    wanted = _wanted(spec, new)
    _close("query", found[0], wanted[0])
    if keep:
        _close("key", found[1], wanted[1])
        _close("value", found[2], wanted[2])
    kept = SLOTS >= 0
    at = SLOTS[kept] // size, SLOTS[kept] % size
    scales = (params.k_scale, params.v_scale)
    for i, (name, stored) in enumerate((("key", cache.key), ("value", cache.value))):
        _stored(name, stored[at], wanted[i + 1][kept], scales[i] if quantised else None, dtype)
        rest, was = stored.clone(), held[i]
        rest[at] = was[at]
        same = torch.equal(rest.view(torch.uint8), was.view(torch.uint8))
        assert same, f"a {name} was written where no slot is"


def _wanted(spec: LayerSpec, new: NewTokens) -> list[torch.Tensor]:
    """Query, key and value as they should be, in float64."""
    assert spec.rope is not None and new.key is not None and new.value is not None
    biases = new.biases() or [torch.zeros(())] * 3
    parts = (new.query, new.key, new.value)
    wanted = [x.double() + b for x, b in zip(parts, biases, strict=True)]
    for index in (0, 1):
        if (norms := new.norms) is not None:
            weight, x = (norms.query, norms.key)[index], wanted[index]
            rows = x if norms.over == "head" else x.flatten(1)
            normed = torch.nn.functional.rms_norm(
                rows,
                rows.shape[-1:],
                weight.double(),
                norms.eps,  # type: ignore[union-attr]
            )
            wanted[index] = normed.view_as(x)
        offset = wanted[index].shape[2] - spec.rope.span if spec.latent else 0
        wanted[index] = rotate(wanted[index], POSITIONS, spec.rope, offset=offset)
    wanted[0] *= query_temperature(spec.rope, POSITIONS)[:, None, None]
    if spec.latent:
        wanted[2] = wanted[1][..., : spec.latent.rank]
    return wanted


def _plan(run: Any, slots: torch.Tensor) -> Any:
    from polyattn.runtime.program import StorePlan

    store = getattr(run, "__self__", None)
    return store.plan(slots) if store is not None else StorePlan(slots)


def _close(name: str, found: torch.Tensor | None, wanted: torch.Tensor) -> None:
    """Within a rounding to its dtype of what is exact, and float32's own errors."""
    assert found is not None and found.shape == wanted.shape
    unit = torch.finfo(found.dtype).eps
    fine = 1e-15 if found.dtype == torch.float64 else 1e-6
    size = wanted.abs().amax(-1, keepdim=True)
    error = (found.double() - wanted).abs()
    bound = unit / 2 * wanted.abs() * (1 + 1e-6) + fine * size + 1e-30
    if found.dtype == torch.float16:
        bound = bound + 2.0**-25  # half of its smallest number
    ok = (error <= bound) | wanted.isnan() & found.isnan()
    assert bool(ok.all()), f"{name} is off by {(error / size).nan_to_num().max():.3g} of its size"


def _stored(
    name: str, found: torch.Tensor, wanted: torch.Tensor, scale: float | None, dtype: torch.dtype
) -> None:
    if scale is None:
        _close(name, found, wanted)
        return
    exact = wanted / scale
    if found.dtype == torch.int8:
        limit, step = 127.0, torch.full_like(exact, 0.5)
    else:
        limits, unit = torch.finfo(found.dtype), {3: 2.0**-4, 2: 2.0**-3}
        mantissa = 3 if found.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) else 2
        limit = limits.max
        step = torch.maximum(
            unit[mantissa] * exact.abs(), torch.tensor(limits.tiny * unit[mantissa])
        )
    exact = exact.clamp(-limit, limit)
    # A key may be rounded to the layer's dtype before.
    slack = torch.finfo(dtype).eps * exact.abs() + 2e-6 * exact.abs().amax(-1, keepdim=True)
    error = (found.double() - exact).abs()
    assert bool((error <= step + slack).all()), f"{name} is off by {error.max():.3g} of its scale"
