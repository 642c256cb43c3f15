"""Beam search over one cache, no key copied, against beams that each keep their whole history."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreting import interpreted
from polyattn import (
    Attention,
    Batch,
    CacheFormat,
    KVCache,
    LayerGroup,
    LayerSpec,
    Settings,
    beam_batch,
    select,
)
from polyattn.errors import BatchError
from polyattn.families.attention import reference
from polyattn.families.attention.prefix import PrefixPlan
from polyattn.workload.compare import output_error
from polyattn.workload.tolerance import tolerance_of

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
SIZE, SEQS, BEAMS, STEPS = 8, 2, 3, 12
CONTEXTS = [21, 9]


def cache_of(form: CacheFormat, lies: str, blocks: int) -> KVCache:
    """A cache as engines lay it out: K's and V's blocks in turn, or those of three layers."""
    if lies == "pool":
        pool = torch.empty(blocks, 3, 2, form.block_size, form.num_kv_heads, form.head_size)
        return KVCache(pool[:, 1, 0], pool[:, 1, 1])
    return KVCache.allocate(replace(form, apart=2 * form.block_size * (lies == "in turn")), blocks)


def histories_agree(backend: str, lies: str = "side by side", **changes: int) -> None:
    """Random parents at every step: each beam takes over another's tokens, and its indirection."""
    spec = SPEC.replace(**changes)
    of_blocks = spec.replace(block_size=SIZE)
    layout = Settings(layout="HND" if lies == "HND" else "NHD")
    group = LayerGroup(select(of_blocks, "cpu", backend=backend, settings=layout))
    by_token = LayerGroup(select(spec.replace(block_size=1), "cpu", backend=backend))
    context_layer, layer = Attention(group, checks=True), Attention(by_token, checks=True)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int, heads: int = 2) -> torch.Tensor:
        return torch.randn(count, heads, 16, generator=generator)

    blocks = -(-(max(CONTEXTS) + STEPS) // SIZE)
    table = torch.randperm(SEQS * BEAMS * blocks, generator=generator).int()
    table = table.view(SEQS, BEAMS, blocks)
    for index, length in enumerate(CONTEXTS):  # full blocks of a context are the same for all beams
        table[index, :, : length // SIZE] = table[index, :1, : length // SIZE]
    assert group.cache_format is not None
    cache = cache_of(group.cache_format, lies, SEQS * BEAMS * blocks)
    cache.key.fill_(torch.nan), cache.value.fill_(torch.nan)
    batch = Batch.from_lens(CONTEXTS, CONTEXTS, table[:, 0].contiguous(), SIZE)
    key, value = tokens(batch.num_tokens), tokens(batch.num_tokens)
    context_layer.store(key, value, cache, batch.slot_mapping)
    kept = [
        [(key[a:b], value[a:b]) for _ in range(BEAMS)]
        for a, b in zip(batch.starts, batch.starts[1:], strict=False)
    ]
    indirection = torch.zeros(SEQS, BEAMS, max(CONTEXTS) + STEPS, dtype=torch.int32)
    view, apart = cache.in_blocks_of(1)
    for step in range(STEPS):
        lens = [n + step + 1 for n in CONTEXTS]
        batch = beam_batch(lens, table, indirection, SIZE, apart)
        query, key, value = tokens(SEQS * BEAMS, 4), tokens(SEQS * BEAMS), tokens(SEQS * BEAMS)
        out = layer(query, key, value, view, batch)
        for index in range(SEQS):
            for beam in range(BEAMS):
                row = slice(index * BEAMS + beam, index * BEAMS + beam + 1)
                one = kept[index][beam]
                one = torch.cat([one[0], key[row]]), torch.cat([one[1], value[row]])
                kept[index][beam] = one
                expected, _ = reference.attend(spec, query[row], *one)
                assert output_error(out[row], expected) <= tolerance_of(spec).output
            indirection[index, :, lens[index] - 1] = torch.arange(BEAMS)
            parents = torch.randint(BEAMS, (BEAMS,), generator=generator)
            indirection[index] = indirection[index, parents]
            kept[index] = [kept[index][parent] for parent in parents]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "NATIVE_ATTN"])
def test_beams_take_over_each_others_tokens(backend: str, window: int | None) -> None:
    histories_agree(backend, **({} if window is None else {"sliding_window": window}))


@pytest.mark.parametrize("lies", ["HND", "in turn", "pool"])
def test_beams_over_blocks_that_lie_apart(lies: str) -> None:
    histories_agree("NATIVE_ATTN", lies)


@pytest.mark.slow
def test_the_interpreted_kernel_takes_beams() -> None:
    pytest.importorskip("triton")
    interpreted(__file__)


def test_a_context_is_read_once_for_all_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one sequence have its context in common: found from the table of single tokens."""
    monkeypatch.setattr("polyattn.families.attention.sharing.CALL_US", {"cpu": 0.0})
    group = LayerGroup(select(SPEC.replace(block_size=1), "cpu", backend="TORCH_SDPA"))
    table = torch.arange(8, dtype=torch.int32).view(1, 1, 8).repeat(1, 4, 1)
    table[0, :, 5:] += torch.arange(4, dtype=torch.int32)[:, None] * 3
    batch = beam_batch([60], table, torch.zeros(1, 4, 64, dtype=torch.int32), SIZE)
    (call,) = group.plan(batch).calls
    assert call.phase == "decode" and isinstance(call.plan, PrefixPlan)
    assert call.saved_bytes == 3 * 59 * 2 * 2 * 16 * 4


def test_bad_input() -> None:
    table = torch.zeros(2, 3, 4, dtype=torch.int32)
    indirection = torch.zeros(2, 3, 32, dtype=torch.int32)
    for arguments, text in (
        (([5, 33], table, indirection, 8), r"seq_lens\[1\]=33 must be 1 to 32"),
        (([5, 0], table, indirection, 8), r"seq_lens\[1\]=0"),
        (([5], table, indirection, 8), "of 1 sequences"),
        (([5, 5], table[:, :2], indirection, 8), "2 beams and cache_indirection 3"),
        (([5, 5], table.long(), indirection, 8), "block_table is torch.int64"),
        (([5, 5], table.tolist(), indirection, 8), "block_table=.* must be a tensor"),
        (([5, 5], table, indirection, 0), "block_size=0"),
        (
            ([5, 5], table, indirection, 8, 7),
            "step=7 must be an integer, the block size, 8, or more",
        ),
        (([5, 5], table + 1, indirection, 8, 1 << 31), "names block 1, whose tokens in steps of"),
        (([5, 5], table, indirection + 3, 8), r"cache_indirection\[0\] names beam 3; there are 3"),
    ):
        with pytest.raises(BatchError, match=text):
            beam_batch(*arguments)  # type: ignore[arg-type]


def test_a_cache_in_blocks_is_one_of_tokens() -> None:
    cache = KVCache(torch.arange(2 * 4 * 3.0).view(2, 4, 1, 3), torch.zeros(2, 4, 1, 3))
    view, step = cache.in_blocks_of(1)
    assert step == 4 and torch.equal(view.key[1 * 4 + 2, 0], cache.key[1, 2])


if __name__ == "__main__":
    STEPS = 3
    histories_agree("TRITON_ATTN")
