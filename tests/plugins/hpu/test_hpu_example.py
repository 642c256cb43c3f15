"""The example of the Unified Attention post, step by step: what goes where, and that it adds up.

Blocks of 4 tokens; two prefills and two decodes, query lengths 8, 4, 1, 1 after contexts of 0, 4, 6,
4 tokens. In blocks (p: prefill's new key, c: context, d: a decode's new key, which is in the cache):

    sequence 0   block 0: p p p p   block 1: p p p p
    sequence 1   block 2: c c c c   block 3: p p p p
    sequence 2   block 4: c c c c   block 5: c c d .
    sequence 3   block 6: c c c c   block 7: d . . .
"""

from __future__ import annotations

import torch
from plugins.hpu.steps import Step, step
from polyattn_hpu import unified
from polyattn_hpu.buckets import EXACT, Bucket
from polyattn_hpu.metadata import Metadata, build
from torch import Tensor

QUERY_LENS = [8, 4, 1, 1]
CONTEXTS = [0, 4, 6, 4]
TABLE = [[0, 1], [2, 3], [4, 5], [6, 7]]
NONE = -torch.inf


def example() -> tuple[Step, Metadata]:
    made = step(QUERY_LENS, CONTEXTS, TABLE)
    return made, made.metadata()


def over(made: Step, token: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A triplet by its formula: unnormalised value, maximum, sum, for one token, head by head."""
    groups = made.spec.gqa_ratio
    scores = torch.einsum(
        "hd,khd->hk", made.query[token], keys.repeat_interleave(groups, 1)
    ) * made.spec.scale  # fmt: skip
    maximum = scores.amax(1)
    weights = torch.exp(scores - maximum[:, None])
    value = torch.einsum("hk,khd->hd", weights, values.repeat_interleave(groups, 1))
    return value, maximum, weights.sum(1)


def agree(found: unified.Partial, token: int, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    assert found.value is not None and found.maximum is not None and found.total is not None
    rows = (found.value[token, :, :-1], found.maximum[token], found.total[token])
    for a, b in zip(rows, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_step_1_the_phase_and_its_sizes() -> None:
    """14 query tokens in a row; one block is shared, four are unique, four rows give logits."""
    _, meta = example()
    assert meta.bucket == Bucket("csu", query=14, shared=1, unique=4, logits=4)


def test_step_2_the_merged_causal_bias() -> None:
    """One mask over all new tokens: a triangle a prefill, nothing for the decodes.

    A decode's own key is in the cache already, and counts there: its row and its column are empty.
    """
    _, meta = example()
    (mask,) = meta.causal_masks
    expected = torch.zeros(14, 14, dtype=torch.bool)
    expected[:8, :8] = torch.ones(8, 8).tril().bool()
    expected[8:12, 8:12] = torch.ones(4, 4).tril().bool()
    assert torch.equal(mask, expected)


def test_step_3_the_causal_part() -> None:
    """Attention of each prefill's tokens over its own new keys; the decodes saw none."""
    made, meta = example()
    found = unified.causal(meta, made.query, made.key, made.value, made.scoring())
    for token in range(12):
        first = 0 if token < 8 else 8
        seen = slice(first, token + 1)
        agree(found, token, over(made, token, made.key[seen], made.value[seen]))
    assert found.maximum is not None and found.total is not None
    assert bool((found.maximum[12:] == NONE).all()) and not found.total[12:].any()


def test_step_4_the_shared_part() -> None:
    """Block 2, context of sequence 1's four tokens, is fetched once and meets every query."""
    made, meta = example()
    assert meta.shared_blocks.tolist() == [2] and meta.shared_starts.tolist() == [0]
    assert meta.member[:, 0].tolist() == [False, True, False, False, False]
    found = unified.shared(meta, made.query, (made.cache.key, made.cache.value), made.scoring())
    for token in range(8, 12):
        agree(found, token, over(made, token, made.cache.key[2], made.cache.value[2]))
    assert found.total is not None
    others = [*range(8), 12, 13]
    assert not found.total[others].any(), "a row that doesn't use the block has no sum"


def test_step_5_the_unique_blocks() -> None:
    """A flat list of the decodes' blocks: of which sequence each is, and how much of it is used."""
    _, meta = example()
    assert meta.unique_blocks is not None
    assert meta.unique_blocks.tolist() == [4, 5, 6, 7]
    assert meta.unique_groups.tolist() == [2, 2, 3, 3]
    assert meta.unique_rows.tolist() == [12, 12, 13, 13]
    assert meta.unique_masks.sum(1).tolist() == [4, 3, 4, 1], "block usages"


def test_step_6_the_unique_part() -> None:
    """Softmax a block, then a sequence's blocks are readjusted to their common maximum and added."""
    made, meta = example()
    found = unified.unique(meta, made.query, (made.cache.key, made.cache.value), made.scoring())
    for token, blocks, length in ((12, [4, 5], 7), (13, [6, 7], 5)):
        keys, values = (
            stored[blocks].flatten(0, 1)[:length] for stored in (made.cache.key, made.cache.value)
        )
        agree(found, token, over(made, token, keys, values))
    assert found.total is not None and not found.total[:12].any()


def test_step_7_the_parts_add_up() -> None:
    """Readjusted to the largest maximum, added, divided once: the whole softmax."""
    made, _ = example()
    output, lse = made.unified()
    expected, expected_lse = made.reference()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_step_8_the_same_from_a_slice_of_the_cache() -> None:
    """The unique part may read blocks 0 to 7 as they lie; those of others are masked out."""
    _, listed = example()
    lower = step([1, 1, 8, 4], [6, 4, 0, 4], [[0, 1], [2, 3], [4, 5], [6, 7]])
    meta = lower.metadata()
    assert meta.bucket.contiguous and meta.bucket.unique == 4 and meta.unique_blocks is None
    assert meta.unique_groups.tolist() == [0, 0, 1, 1]
    assert not listed.bucket.contiguous, "here a slice would be twice as long as the list"
    torch.testing.assert_close(lower.unified()[0], lower.reference()[0])


def test_each_decodes_own_key_counts_once() -> None:
    """The negative control: with the decodes' keys in the causal part too, the result is wrong."""
    made, meta = example()
    (mask,) = meta.causal_masks
    mask[12, 12] = mask[13, 13] = True
    found = unified.attend(
        meta, made.query, made.key, made.value, (made.cache.key, made.cache.value), made.scoring()
    )
    error = (unified.normalize(found)[0] - made.reference()[0]).norm(dim=-1)
    assert float(error[:12].max()) < 1e-12 and float(error[12:].max()) > 0.1


def test_decodes_alone_need_no_causal_part() -> None:
    spec = example()[0].spec
    meta = build(
        spec, [1, 1], [7, 5], torch.tensor([[4, 5], [6, 7]], dtype=torch.int32).numpy(), 4,
        fresh=True, rounding=EXACT,
    )  # fmt: skip
    assert meta.bucket.phase == "--u" and meta.causal_masks == ()
