"""Decodes over latents that share blocks: read once by calls and merges, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from polyattn import Batch, LatentAttention, LayerGroup, LayerSpec, SharedRun, discover, select
from polyattn.families.attention import sharing
from polyattn.families.attention.prefix import PrefixDecode, PrefixPlan
from polyattn.families.attention.sharing import Sharing
from polyattn.families.mla import reference
from polyattn.families.mla.workload import latent_weights
from polyattn.registry.devices import resolve_device
from polyattn.spec.latent import LatentSpec
from polyattn.workload.compare import output_error
from polyattn.workload.pages import put
from polyattn.workload.tolerance import tolerance_of

SPEC = LayerSpec(
    kind="mla", num_heads=4, head_size=48, v_head_size=32, dtype="float32", block_size=16,
    latent=LatentSpec(rank=64, rope_head_size=16),
)  # fmt: skip
LENS = [100, 70, 68, 90, 33, 1]
SHARED = {(0, 1, 2, 3): (0, 2), (0, 3): (2, 2)}


def shared_step(group: LayerGroup) -> tuple[Any, Batch]:
    """A cache that holds every sequence, and the decode of each one's last token."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randperm(63, generator=generator)[: 6 * 7].view(6, 7).int() + 1
    for rows, (first, count) in SHARED.items():
        table[list(rows), first : first + count] = table[rows[0], first : first + count]
    cache = group.allocate_cache(64)
    cache.key.zero_()
    slots = Batch.from_lens(LENS, LENS, table, 16).slot_mapping
    assert slots is not None
    rows = torch.randn(len(slots), 1, 80, generator=generator)
    put(cache, rows, rows[..., :64], slots, (0.05, 0.05))
    return cache, Batch(list(range(len(LENS) + 1)), LENS, table)


@pytest.mark.parametrize("weights", [True, False], ids=["absorbs", "the caller absorbs"])
@pytest.mark.parametrize("cached", ["auto", "int8"])
@pytest.mark.parametrize("levels", ["found", "told"])
def test_shared_latents_are_read_once(
    levels: str, cached: str, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "CALL_US", {"cpu": 0.0})
    spec = SPEC.replace(kv_cache_dtype=cached)
    group = LayerGroup(select(spec, "cpu", backend="decode=TORCH_MLA"))
    torch_mla = discover().backend("TORCH_MLA")
    planner: Any = group.planner
    planner.sharing.calls, planner.sharing.reason = PrefixDecode(group, torch_mla, torch_mla), ""
    cache, batch = shared_step(group)
    if levels == "told":
        forest = tuple((SharedRun(rows, *where),) for rows, where in SHARED.items())
        batch = batch.with_shared_prefix(forest)
    plan = group.plan(batch)
    (call,) = plan.calls
    assert isinstance(call.plan, PrefixPlan)
    saved = 3 * 2 + 1 * 2  # blocks that rows beside the first of a run don't read
    assert call.saved_bytes == saved * 16 * group.cache_format.bytes_per_token
    assert "reads 2 shared prefixes once" in plan.explain()
    both = latent_weights(spec, torch.Generator().manual_seed(5))
    scale = {"k_scale": 0.05} if cached == "int8" else {}
    layer = LatentAttention(group, *both, **scale)
    query = torch.randn(len(LENS), 4, 48, generator=torch.Generator().manual_seed(7))
    expected, _ = reference.forward(spec, query, cache, batch, both, layer.params)
    if weights:
        out = layer(query, None, None, cache, plan)
    else:
        plain = LatentAttention(group, **scale)
        absorbed = torch.einsum("thd,hdr->thr", query[..., :32], both[0])
        latents = plain(torch.cat([absorbed, query[..., 32:]], 2), None, None, cache, plan)
        out = torch.einsum("thr,hrv->thv", latents, both[1])
    assert output_error(out, expected) <= tolerance_of(spec).output


def test_nothing_is_gained_where_products_take_longer_than_bytes() -> None:
    """Each row's heads are multiplied by a latent however often it is read: with 128 heads that binds."""
    latent = LatentSpec(rank=512, rope_head_size=64)
    gained = {}
    for device in ("h100-sxm", "h200"):
        for heads in (16, 32, 128):
            spec = SPEC.replace(
                num_heads=heads, num_kv_heads=heads, head_size=192, v_head_size=128, latent=latent
            )
            form = SimpleNamespace(block_size=64, bytes_per_token=1152)
            group: Any = SimpleNamespace(
                spec=spec, device=resolve_device(device), cache_format=form
            )
            gained[device, heads] = Sharing(group, None, None)._saved_us(100 << 20)
    assert all((us > 0) == (heads < 128) for (_, heads), us in gained.items())
    assert gained["h200", 16] > gained["h200", 32]


def test_chosen_rows_are_refused_by_name() -> None:
    from polyattn.families.attention.sharing import why_not
    from polyattn.spec.sparse import SparseSpec

    assert why_not(SPEC) is None
    assert "each token reads its own rows" in str(
        why_not(SPEC.replace(kind="sparse_mla", sparse=SparseSpec(budget=8)))
    )
