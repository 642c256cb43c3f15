"""The views of examples/engine_metadata.py, beside values worked out by hand."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from formulas import attend, in_window
from polyattn import Batch, attention
from polyattn.errors import BatchError
from polyattn.runtime.step.integers import REMEMBERED
from torch.nn.utils.rnn import pad_sequence

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/engine_metadata.py"
NAMES = runpy.run_path(str(EXAMPLE))
TensorRTLLMMetadata, VLLMMetadata = NAMES["TensorRTLLMMetadata"], NAMES["VLLMMetadata"]

TABLE = torch.tensor([[3, 4], [5, 0], [6, 7]], dtype=torch.int32)
# A fresh prompt of 5 tokens, a chunk of 3 behind 4 cached ones, a generation at its 20th token.
STEP = Batch.from_lens([5, 3, 1], [5, 7, 20], TABLE, 16)


def test_contexts_come_first_and_generations_follow() -> None:
    view = TensorRTLLMMetadata(STEP)
    assert (view.num_seqs, view.num_contexts, view.num_generations) == (3, 2, 1)
    assert view.seq_lens.tolist() == [5, 3, 1] and view.seq_lens_cuda.tolist() == [5, 3, 1]
    assert view.seq_lens_kv is view.seq_lens and not view.is_cross
    assert view.context_lens.tolist() == [5, 3]
    assert (view.num_ctx_tokens, view.num_tokens) == (8, 9)
    assert view.num_cached_tokens_per_seq == [0, 4, 19]
    assert view.kv_lens_cuda.tolist() == [5, 7, 20]
    assert view.position_ids.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 19]
    assert view.position_ids.dtype == torch.int32
    assert view.block_ids_per_seq is TABLE


def test_a_generations_prompt_has_to_be_given() -> None:
    with pytest.raises(BatchError, match="prompt_lens of generations"):
        _ = TensorRTLLMMetadata(STEP).prompt_lens
    assert TensorRTLLMMetadata(STEP, prompt_lens=[5, 3, 12]).prompt_lens == [5, 3, 12]
    contexts = TensorRTLLMMetadata(Batch.from_lens([5, 3], [5, 7]))
    assert contexts.prompt_lens == [5, 3]
    with pytest.raises(BatchError, match="prompt_lens has 2 entries"):
        TensorRTLLMMetadata(STEP, prompt_lens=[5, 3])


def test_an_order_that_tensorrt_llm_does_not_know_is_refused() -> None:
    mixed = Batch.from_lens([1, 5], [20, 5])
    with pytest.raises(BatchError, match="sequence 0 has one query token"):
        _ = TensorRTLLMMetadata(mixed).num_contexts
    assert TensorRTLLMMetadata(mixed).seq_lens.tolist() == [1, 5]  # what needs no order is there


def test_drafts_under_verification_are_generations_where_the_engine_says_so() -> None:
    drafts = Batch.from_lens([4, 4], [20, 9])
    view = TensorRTLLMMetadata(drafts, num_contexts=0)
    assert (view.num_generations, view.num_ctx_tokens, view.num_tokens) == (2, 0, 8)
    assert view.context_lens.tolist() == []
    with pytest.raises(BatchError, match="num_contexts=3"):
        TensorRTLLMMetadata(drafts, num_contexts=3)


def test_cross_attention_has_the_other_sequences_keys() -> None:
    cross = TensorRTLLMMetadata(Batch.from_lens([1, 2], [30, 8]), cross=True, num_contexts=0)
    assert cross.is_cross and cross.seq_lens.tolist() == [1, 2]
    assert cross.seq_lens_kv.tolist() == [30, 8] == cross.seq_lens_kv_cuda.tolist()
    assert cross.num_tokens == 38
    with pytest.raises(BatchError, match="cross-attention"):
        _ = cross.num_cached_tokens_per_seq


def test_vllms_names() -> None:
    view = VLLMMetadata(STEP)
    assert view.query_start_loc.tolist() == [0, 5, 8, 9] == view.query_start_loc_cpu.tolist()
    assert view.seq_lens.tolist() == [5, 7, 20] == view.seq_lens_cpu.tolist()
    assert view.num_computed_tokens_cpu.tolist() == [0, 4, 19]
    assert view.compute_num_computed_tokens().tolist() == [0, 4, 19]
    assert (view.num_reqs, view.batch_size(), view.num_actual_tokens) == (3, 3, 9)
    assert (view.max_query_len, view.max_seq_len) == (5, 20)
    assert view.naive_query_lens().tolist() == [5, 3, 1]
    assert view.block_table_tensor is TABLE
    # Block 3's first five slots; offsets 4, 5, 6 of block 5; offset 3 of the third row's second block.
    assert view.slot_mapping is not None
    assert view.slot_mapping.tolist() == [48, 49, 50, 51, 52, 84, 85, 86, 7 * 16 + 3]


def test_a_padding_row_has_computed_nothing() -> None:
    padded = Batch.from_lens([1, 1], [3, 0])
    assert VLLMMetadata(padded).num_computed_tokens_cpu.tolist() == [2, 0]
    assert TensorRTLLMMetadata(padded).num_cached_tokens_per_seq == [2, 0]


@pytest.mark.parametrize("queries", [[1, 1, 5, 3], [5, 1, 3, 1], [1, 1], [4], []])
def test_a_batch_counts_prefill_and_decode_tokens_as_vllm_does(queries: list[int]) -> None:
    """vLLM reorders decodes to the front; then the counts are places in its query_start_loc."""
    batch = Batch.from_lens(queries, [9] * len(queries))
    ordered = Batch.from_lens(sorted(queries, key=lambda q: q > 1), [9] * len(queries))
    decodes = sum(q <= 1 for q in queries)
    assert batch.num_decode_tokens == ordered.starts[decodes]
    assert batch.num_prefill_tokens == ordered.num_tokens - ordered.starts[decodes]
    assert STEP.block_tables is STEP.block_table


@pytest.mark.parametrize("rows", [1, REMEMBERED - 1, REMEMBERED, REMEMBERED + 1])
def test_any_number_of_rows_starts_where_it_says(rows: int) -> None:
    """Decodes of up to `REMEMBERED` rows share their starts; a longer first row has its own."""
    for first in (1, 2, 1):
        batch = Batch([0, *range(first, rows + first)], [5] * rows)
        assert batch.host_starts.tolist() == batch.query_start_loc.tolist() == batch.starts
        assert batch.host_query_lens.tolist() == [first] + [1] * (rows - 1)
        assert batch.all_decode == (first == 1) and batch.num_tokens == rows + first - 1


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "TensorRT-LLM: 2 contexts, [0, 4, 19] cached", "vLLM: [0, 4, 19] computed"
    ]  # fmt: skip


XFORMERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "BlockDiagonalMask": ({}, -1, -1),
    "causal from the bottom right": ({"causal": True}, -1, 0),
    "local, of a window of 3": ({"causal": True, "sliding_window": 3}, 2, 0),
    "LocalAttentionFromBottomRightMask(2, 1)": ({"sliding_window": 2 + 1, "window_right": 1}, 2, 1),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ({"causal": True}, -1, 0),
}
"""The calls of metadata.md's table, and the keys that xFormers shows before and behind a query's."""


@pytest.mark.parametrize("name", XFORMERS)
def test_xformers_masks_are_calls_of_attention(name: str) -> None:
    (options, left, right), padded = XFORMERS[name], "Padded" in name
    queries, keys = ([3, 3, 3], [7, 3, 4]) if padded else ([3, 5, 1], [7, 5, 4])
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(sum(lens), heads, 16, generator=generator)
        for lens, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    expected = [
        attend(*p, in_window(len(p[0]), len(p[1]), left, right), scale=0.5)[0] for p in parts
    ]
    if padded:  # dense rows, each with room for the most keys
        query = query.unflatten(0, (3, 3))
        key, value = (pad_sequence(t.split(keys), batch_first=True) for t in (key, value))
    else:
        options = {"query_lens": queries, **options}
    result = attention(query, key, value, key_lens=keys, scale=0.5, **options)
    torch.testing.assert_close(
        result.reshape(-1, 4, 16).double(), torch.cat(expected), rtol=0, atol=1e-5
    )
