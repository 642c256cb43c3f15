"""torch tensors that live in JAX, through LayerGroup and Attention like any other device's.

In a process of its own: torchax's environment stands before all of torch while it is entered.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest
from forks import python

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="torchax is not installed")

TWO_DEVICES = "--xla_force_host_platform_device_count=2"
HEAD = """
import warnings
warnings.filterwarnings("ignore")  # JAX says at each int64 that it is an int32
import torch
import polyattn_tpu
torchax = polyattn_tpu.torchax()
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select
from polyattn.workload.compare import output_error
from polyattn.families.attention import reference
environment = torchax.default_env()
spec = LayerSpec(num_heads=2, num_kv_heads=1, head_size=64, dtype="float32", block_size=8)
def layer_of(spec):
    selection = select(spec, "jax")
    return Attention(LayerGroup(selection), checks=True)
def step(layer, queries, lens, fill=None):
    cache = layer.group.allocate_cache(6)
    for stored in (cache.key, cache.value):
        stored.copy_(torch.randn(stored.shape).to("jax"))
    table = torch.tensor([[1, 4, 0], [3, 5, 2]], dtype=torch.int32, device="jax")
    batch = Batch.from_lens(queries, lens, table, 8)
    tokens = sum(queries)
    given = [torch.randn(tokens, heads, 64).to("jax") for heads in (2, 1, 1)]
    return cache, batch, given
"""


def run(code: str, **environment: str) -> str:
    variables = {
        "JAX_PLATFORMS": "cpu", "PALLAS_INTERPRET": "1", "PALLAS_BUCKETS": "tokens=32,seqs=4,pages=64",
    }  # fmt: skip
    found = python("-c", HEAD + code, seconds=500, **variables | environment)
    assert found.returncode == 0, found.stdout[-1000:] + found.stderr[-3000:]
    return found.stdout


WITHOUT_SHARING = """
import jax, torch.utils.dlpack
def never(*_, **__):
    raise AssertionError("memory was shared between torch and JAX")
jax.dlpack.from_dlpack = torch.from_dlpack = torch.utils.dlpack.from_dlpack = never
torch.utils.dlpack.to_dlpack = torch.Tensor.__dlpack__ = never
elsewhere = jax.devices()[1]
with environment:
    layer = layer_of(spec)
    print(layer.group.selection.decision.summary())
    cache, batch, (query, key, value) = step(layer, [1, 7], [12, 20])
    # All on a second device: what went by way of the host would come back on the first.
    from polyattn_tpu.bridge import root
    for tensor in (query, key, value, root(cache.key), root(cache.value)):
        tensor.apply_jax_(jax.device_put, elsewhere)
    out = layer(query, key, value, cache, batch)
    assert out.jax().devices() == {elsewhere} and root(cache.key).jax().devices() == {elsewhere}
    right, _ = reference.forward(spec, query, None, None, cache, batch)
    error = output_error(out, right)
    assert error < 2e-5, error
"""


@pytest.mark.slow
def test_nothing_is_tied_to_the_host_s_memory() -> None:
    """DLPack forbidden in both directions, and all tensors on a second device of JAX."""
    said = run(WITHOUT_SHARING, XLA_FLAGS=f"{os.environ['XLA_FLAGS']} {TWO_DEVICES}")
    assert "PALLAS_ATTN" in said and "JAX_STORE" in said


IN_PLACE = """
from polyattn_tpu.bridge import root, unshared
with environment:
    layer = layer_of(spec)
    store = layer.group.backend("store", __import__("polyattn.kernel").kernel.StoreBackend,
                                cache=layer.group.cache_format)
    cache = layer.group.allocate_cache(4)
    rows = torch.ones(2, 1, 64, device="jax")
    slots = torch.tensor([9, -1], dtype=torch.int64, device="jax")
    before = root(cache.key).jax()
    assert not unshared(root(cache.key))
    store.run(store.plan(slots), rows, rows, cache, layer.params)
    assert not before.is_deleted() and not bool(before.any()), "a name that is held lost its array"
    del before
    assert unshared(root(cache.key)) and unshared(root(cache.value))
    import weakref
    held = root(cache.value).jax().unsafe_buffer_pointer()
    store.run(store.plan(slots + 1), rows, rows, cache, layer.params)
    assert root(cache.value).jax().unsafe_buffer_pointer() == held, "the cache was copied"
    found = cache.key.cpu()
    assert found.shape == (4, 8, 1, 64) and float(found[1, 1].sum()) == 64.0
    assert float(found.sum()) == 3 * 64.0 and float(found[0, 0].sum()) == 64.0
    cache.key[2] = 3.0
    assert float(root(cache.key).jax()[2, 0, :, :64].min()) == 3.0
    assert float(root(cache.key).jax()[..., 64:].max()) == 0.0
"""

VIEWS = """
def each(change):
    for device in ("cpu", "jax"):
        whole = torch.zeros(6, 3).to(device)
        place = lambda *numbers: torch.tensor(numbers, device=device)
        change(whole[1:5], place)
        change(whole[1:6][1:], place)
        yield whole.cpu()
def change_items(view, place):
    view[place(0, 2)] = 4.0
    view[place(1), place(2)] = 5.0
    view[3, 1:] = torch.ones(2).to(view.device)
with environment:
    for name, change in {
        "index_copy_": lambda v, at: v.index_copy_(0, at(3, 0), torch.ones(2, 3).to(v.device)),
        "masked_fill_": lambda v, at: v.masked_fill_((at(0, 1, 1, 0) > 0)[:, None], 2.0),
        "fill_": lambda v, at: v.fill_(3.0),
        "zero_": lambda v, at: v.fill_(3.0).zero_(),
        "copy_": lambda v, at: v.copy_(torch.ones(4, 3).to(v.device)),
        "add_": lambda v, at: v.add_(1.5),
        "items": change_items,
    }.items():
        right, found = each(change)
        assert torch.equal(found, right), (name, found, right)
        assert bool(right.any()) == (name != "zero_"), name
"""
"""Operators in place, and items named by tensors, on a view and on a view of one."""

PARAMETERS = """
with environment:
    layer_spec = spec.replace(learned_sinks=True)
    sinks = torch.zeros(2).to("jax")
    layer = Attention(LayerGroup(select(layer_spec, "jax")), sinks=sinks)
    cache, batch, given = step(layer, [1, 7], [12, 20])
    for value in (0.0, 2.5):
        sinks.fill_(value)
        out = layer(*given, cache, batch)
        now = type(layer.params)(torch.full((2,), value))
        right, _ = reference.forward(layer_spec, given[0], None, None, cache, batch, now)
        error = output_error(out, right)
        assert error < 2e-5, (value, error)
"""
"""Sinks in JAX, written to after the layer was built: kernels read what they are now."""

CHOSEN = """
from polyattn import SparseAttention, SparseSpec
choice = eval(choice)
spec = LayerSpec(kind="sparse", num_heads=4, num_kv_heads=2, head_size=64, dtype="float32",
                 block_size=16, sparse=choice)
lens, counts = [37, 20], [6, 1]
table = torch.tensor([[5, 2, 7], [1, 4, 3]]).int()
given = [torch.randn(7, heads, 64) for heads in (4, 2, 2)]
held = [torch.randn(8, 16, 2, 64) for _ in range(2)]
last = torch.tensor([31, 32, 33, 34, 35, 36, 19])
ids = torch.stack([torch.stack([torch.randperm(int(t) // choice.granularity + 1)[:2] for t in last])
                   for _ in range(2 if choice.scope == "kv_head" else 1)], 1).int()
def outcome(device, name):
    group = LayerGroup(select(spec, device, backend=name))
    layer, cache = SparseAttention(group), group.allocate_cache(8)
    for stored, numbers in zip((cache.key, cache.value), held):
        stored.copy_(numbers.to(device))
    batch = Batch.from_lens(counts, lens, table.to(device), 16)
    return layer(*(each.to(device) for each in given), cache, batch, choice=ids.to(device))
right = outcome("cpu", "VANILLA")
with environment:
    assert dict(select(spec, "jax").decision.chosen)["decode"] == backend
    out = outcome("jax", backend)
    error = output_error(out.cpu(), right)
assert error < 2e-5, error
"""
"""Blocks that are pages by the kernel, with more rows than there are places; tokens by gathers."""

TOGETHER = {
    "a cache is written in place and a clone of it survives": IN_PLACE,
    "what is written to a view reaches the whole": VIEWS,
    "parameters are kept by reference": PARAMETERS,
    **{
        f"keys that {backend} takes chosen have the reference's results": (
            f"backend, choice = {backend!r}, {choice!r}{CHOSEN}"
        )
        for choice, backend in (
            ('SparseSpec(budget=3, granularity=8, scope="kv_head")', "PALLAS_ATTN"),
            ("SparseSpec(budget=11)", "XLA_PAGES"),
        )
    },
}
EACH = """
import json, sys, traceback
said = {}
for name, code in TOGETHER.items():
    try:
        exec(compile(code, name, "exec"), dict(globals()))
    except Exception:
        said[name] = traceback.format_exc()
    else:
        said[name] = ""
print(json.dumps(said))
"""


@pytest.mark.slow
def test_tensors_in_jax() -> None:
    """The parts of `TOGETHER` in one process, which imports JAX and torchax once for all."""
    said = json.loads(run(f"TOGETHER = {TOGETHER!r}{EACH}").splitlines()[-1])
    assert said.keys() == TOGETHER.keys()
    assert not any(said.values()), "\n".join(f"{part}: {why}" for part, why in said.items() if why)


def test_a_cache_of_another_layout_or_without_room_is_refused() -> None:
    run("""
from polyattn import KVCache
from polyattn.errors import CacheError, PolyattnError
from polyattn_tpu.bridge import pages
with environment:
    plain = torch.zeros(4, 8, 2, 64, device="jax")
    try:
        pages(KVCache(plain, plain))
    except PolyattnError as error:
        assert "allocate it with group.allocate_cache(n)" in str(error)
    else:
        raise AssertionError("a cache that the chip would have to copy was taken")
    try:
        LayerGroup(select(spec, "jax")).allocate_cache(10**12)
    except CacheError as error:
        assert f"num_blocks={10**12} needs" in str(error) and "lower num_blocks" in str(error)
    else:
        raise AssertionError("a cache larger than any memory was made")
""")
