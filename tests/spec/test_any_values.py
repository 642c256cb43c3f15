"""Values of any type in a spec, a batch or a cache: taken, or refused there by name."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyattn import Attention, Batch, CacheFormat, KVCache, LayerGroup, LayerSpec, select
from polyattn.errors import BatchError, CacheError, PolyattnError, SelectionError, SpecError
from polyattn.spec.latent import LatentSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.spec.rope import RopeSpec

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([64, 2**31, 2**63, 10**7, 10**30, -(10**30)])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from(
        ["", "x", "12", "false", "None", "float32", "mla", "decoder", "é\u2028", "9" * 400]
    )
)
odd = scalars | st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = [
    object(), b"4", 1j, np.int64(4), np.float32(2.0), np.array([1, 2]), torch.tensor(3),
    torch.tensor([4.0]), (4,), {4}, range(4), LatentSpec, int,
]  # fmt: skip
anything = odd | st.sampled_from(OBJECTS)

BASES: list[dict[str, Any]] = [
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"},
    {"num_heads": 4, "head_size": 32, "role": "cross", "causal": False},
    {"num_heads": 4, "head_size": 32, "causal": False, "sliding_window": 5, "window_right": 2},
    {"num_heads": 4, "head_size": 24, "v_head_size": 16, "kind": "mla",
     "latent": LatentSpec(rank=32, rope_head_size=8)},
    {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "kind": "mamba2",
     "recurrent": RecurrentSpec(state_size=16)},
]  # fmt: skip
FIELDS = sorted(LayerSpec.__dataclass_fields__)
USUAL = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def changes(names: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)


def says_a_field(error: PolyattnError, names: list[str]) -> None:
    """A refusal names a field, and its length is bounded."""
    assert any(name in str(error) for name in names), error
    assert len(str(error)) < 2000


@settings(USUAL, max_examples=500)
@given(st.sampled_from(BASES), changes(FIELDS, anything))
def test_a_spec(base: dict[str, Any], changed: dict[str, Any]) -> None:
    try:
        spec = LayerSpec(**(base | changed))
    except SpecError as error:
        says_a_field(error, [*FIELDS, "divisible"])
        return
    assert LayerSpec.from_json(spec.to_json()) == spec and hash(spec) == hash(spec.replace())
    assert str(spec) and math.isfinite(spec.scale)
    try:
        selection = select(spec, "cpu")
    except (
        SelectionError,
        SpecError,
    ) as error:  # a variant may be registered until it is asked for
        assert isinstance(error, SelectionError) or "variant=" in str(error)
        return
    assert selection.spec.num_heads == spec.num_heads


PARTS: list[tuple[Any, dict[str, Any]]] = [
    (LatentSpec, {"rank": 32, "rope_head_size": 8}),
    (RecurrentSpec, {"state_size": 16}),
    (RopeSpec, {"rotary_size": 8}),
    (CacheFormat, {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "v_head_size": 32,
                   "dtype": "float32"}),
]  # fmt: skip


def test_no_object_in_any_field_is_more_than_a_spec_error() -> None:
    for kind, base in [*((LayerSpec, base) for base in BASES), *PARTS]:
        for name in kind.__dataclass_fields__:
            for value in OBJECTS:
                try:
                    hash(kind(**(base | {name: value})))
                except (SpecError, CacheError) as error:
                    says_a_field(error, [*kind.__dataclass_fields__, "divisible"])


@settings(USUAL, max_examples=250)
@given(st.data())
def test_the_parts_of_a_spec_and_a_cache(data: st.DataObject) -> None:
    part, base = data.draw(st.sampled_from(PARTS))
    names = sorted(part.__dataclass_fields__)
    changed = data.draw(changes(names, anything))
    try:
        made = part(**(base | changed))
    except (SpecError, CacheError) as error:
        says_a_field(error, names)
        return
    assert isinstance(hash(made), int)
    if part is not CacheFormat:
        return
    width = made.head_size + made.v_head_size
    if made.num_kv_heads * made.block_size * width < 1 << 16:
        try:
            KVCache.allocate(made, 2)
        except CacheError:
            return


@settings(USUAL, max_examples=200)
@given(st.dictionaries(st.sampled_from(FIELDS), odd, max_size=3), st.sampled_from(BASES))
def test_a_spec_from_json(changed: dict[str, Any], base: dict[str, Any]) -> None:
    text = json.dumps(LayerSpec(**base).to_dict() | changed)
    try:
        LayerSpec.from_json(text)
    except SpecError as error:
        assert len(str(error)) < 2000


BATCH: dict[str, Any] = {
    "query_start_loc": [0, 1, 6], "seq_lens": [20, 33],
    "block_table": torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32),
    "slot_mapping": torch.tensor([19, 76, 77, 78, 79, 80]), "state_slots": torch.tensor([1, 0]),
    "key_starts": [0, 20], "host_block_table": None, "shared_prefix": None, "device": "cpu",
}  # fmt: skip
LENS: dict[str, Any] = {
    "query_lens": [1, 5], "seq_lens": [20, 33], "block_table": BATCH["block_table"],
    "block_size": 16, "state_slots": None, "key_starts": None, "device": "cpu",
}  # fmt: skip
tensors = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool]),
)


@settings(USUAL, max_examples=300)
@given(changes(sorted(BATCH), anything | tensors | st.lists(scalars, max_size=4)))
def test_a_batch(changed: dict[str, Any]) -> None:
    try:
        batch = Batch(**(BATCH | changed))
    except BatchError as error:
        says_a_field(error, sorted(BATCH))
        return
    step(batch)


@settings(USUAL, max_examples=300)
@given(changes(sorted(LENS), anything | tensors | st.lists(scalars, max_size=4)))
def test_a_batch_from_lengths(changed: dict[str, Any]) -> None:
    try:
        batch = Batch.from_lens(**(LENS | changed))
    except BatchError as error:
        says_a_field(error, [*sorted(LENS), "query_start_loc"])
        return
    step(batch)


SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
LAYER = Attention(LayerGroup(select(SPEC, "cpu")), checks=True)
CACHE = LAYER.group.allocate_cache(8)


def step(batch: Batch) -> None:
    """A batch that was taken runs, or is refused before anything runs."""
    tokens = batch.num_tokens
    if tokens > 64 or any(n > 1 << 20 for n in batch.lens):
        return
    try:
        LAYER(*(torch.zeros(tokens, h, 32) for h in (4, 2, 2)), CACHE, batch)
    except BatchError as error:
        assert len(str(error)) < 2000


@settings(USUAL, max_examples=150)
@given(changes(["k_scale", "v_scale", "sinks", "alibi_slopes"], anything | tensors))
def test_what_a_layer_is_built_with(changed: dict[str, Any]) -> None:
    try:
        Attention(LAYER.group, **changed)
    except SpecError as error:
        says_a_field(error, ["k_scale", "v_scale", "sinks", "alibi_slopes"])
