"""Is a chosen backend right on this machine? One tiny batch of each phase against the reference."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyattn import reference
from polyattn.backend import LayerParams
from polyattn.batch import Batch
from polyattn.cache import KVCache, KVCacheSpec
from polyattn.decision import Decision
from polyattn.discovery import Registry
from polyattn.errors import PolyattnError
from polyattn.spec import LayerSpec
from polyattn.tolerance import TOLERANCES, lse_error, output_error


def verify_decision(decision: Decision, registry: Registry) -> dict[str, str]:
    """Return, for each chosen backend that fails or is wrong on this machine, what happened."""
    wrong: dict[str, str] = {}
    for phase, name in (("prefill", decision.prefill), ("decode", decision.decode)):
        if name is not None and name not in wrong:
            problem = _problem(decision, registry, phase)
            if problem:
                wrong[name] = f"{phase}: {problem}"
    return wrong


def _problem(decision: Decision, registry: Registry, phase: str) -> str | None:
    from polyattn.layer import Attention
    from polyattn.selector import Selection

    spec = decision.spec
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    try:
        layer = Attention(Selection(decision, registry), **_extras(spec, generator))
        if spec.role.has_cache:
            return _run_cached(layer, spec, phase, generator)
        return _run_dense(layer, spec, generator)
    except PolyattnError as error:
        return str(error)
    except Exception as error:  # whatever a vendor's library raises is a reason, not our end
        return f"{type(error).__name__}: {error}"


def _extras(spec: LayerSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if not spec.learned_sinks:
        return {}
    return {"sinks": torch.randn(spec.num_heads, generator=generator)}


def _random(spec: LayerSpec, generator: torch.Generator, *shape: int) -> torch.Tensor:
    from polyattn.cache import STORAGE_DTYPES

    return torch.randn(*shape, generator=generator).to(STORAGE_DTYPES[spec.dtype])


def _run_cached(layer: object, spec: LayerSpec, phase: str, gen: torch.Generator) -> str | None:
    from polyattn.layer import Attention

    assert isinstance(layer, Attention)
    device = layer.selection.device.torch_device
    size = layer.selection.decision.block_size
    assert size is not None
    lens = [1, size + 1, 3 * size]
    query_lens = [1, 1, 1] if phase == "decode" else [1, size, 5]
    query_lens = [min(q, n) for q, n in zip(query_lens, lens, strict=True)]
    if phase == "prefill":
        query_lens[0] = 0  # not a decode
    table = torch.tensor([[3, 0, 0], [5, 1, 0], [2, 6, 4]], dtype=torch.int32)
    cache_spec: KVCacheSpec = layer.selection.cache_spec(8)
    cache = cache_spec.allocate(str(device))
    _fill(cache, gen)
    batch = Batch.from_lens(query_lens, lens, table.to(str(device)), size)
    tokens = batch.num_tokens
    query = _random(spec, gen, tokens, spec.num_heads, spec.head_size).to(str(device))
    key = _random(spec, gen, tokens, spec.num_kv_heads, spec.head_size).to(str(device))
    value = _random(spec, gen, tokens, spec.num_kv_heads, spec.v_head_size).to(str(device))
    if spec.role.value == "cross":
        key_value = (None, None)
    else:
        key_value = (key, value)  # type: ignore[assignment]
    got = layer(query, *key_value, cache, batch)
    return _compare(spec, got, reference.forward(spec, query, None, None, cache, batch, layer.params))


def _run_dense(layer: object, spec: LayerSpec, gen: torch.Generator) -> str | None:
    from polyattn.layer import Attention

    assert isinstance(layer, Attention)
    device = str(layer.selection.device.torch_device)
    batch = Batch.from_lens([1, 33], [1, 33], device=device)
    query = _random(spec, gen, 34, spec.num_heads, spec.head_size).to(device)
    key = _random(spec, gen, 34, spec.num_kv_heads, spec.head_size).to(device)
    value = _random(spec, gen, 34, spec.num_kv_heads, spec.v_head_size).to(device)
    got = layer(query, key, value, None, batch)
    return _compare(spec, got, reference.forward(spec, query, key, value, None, batch, layer.params))


def _fill(cache: KVCache, gen: torch.Generator) -> None:
    for stored in (cache.key, cache.value):
        values = torch.randn(stored.shape, generator=gen)
        if stored.dtype == torch.int8:
            values = (values * 32).clamp(-127, 127)
        stored.copy_(values.to(stored.dtype).to(stored.device))


def _compare(
    spec: LayerSpec, got: object, expected: tuple[torch.Tensor, torch.Tensor]
) -> str | None:
    out, lse = got if isinstance(got, tuple) else (got, None)
    limit = TOLERANCES[spec.dtype]
    error = output_error(out, expected[0])
    if error > limit.output:
        return f"its output is wrong: relative error {error:.2g}, allowed {limit.output:g}"
    if lse is not None:
        error = lse_error(lse, expected[1])
        if error > limit.lse:
            return f"its LSE is wrong: error {error:.2g}, allowed {limit.lse:g}"
    return None


__all__ = ["LayerParams", "replace", "verify_decision"]
