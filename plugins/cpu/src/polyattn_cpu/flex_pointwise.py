"""FLEX_ATTENTION's calls of a variant's functions. A packed batch's rows aren't positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from polyattn.kernel import AttentionVariant, Batch, Pointwise
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from polyattn_cpu.flex_blocks import BLOCK

PAIRS = 1 << 26
"""Most masked pairs (queries times keys times heads) at a time."""


def variant_problem(variant: AttentionVariant) -> str | None:
    """Return why a variant can't be served: `flex_attention` always takes a softmax."""
    return None if variant.softmax else "torch's flex_attention can't leave the softmax out"


def kernel_options(pointwise: Pointwise | None, device_type: str) -> dict[str, int] | None:
    """Return what the kernel is compiled with where scores read inputs by place, None for torch's own.

    Such an input is gathered for each score of a tile, and would be held for as many tiles ahead as keys
    are: two of them with tiles of 128 x 128 take more shared memory than an H200 has.
    """
    if pointwise is None or pointwise.score_mod is None or device_type != "cuda":
        return None
    of_score = pointwise.inputs.keys() - pointwise.mask_inputs
    sizes = {size for name in of_score for size in pointwise.inputs[name].dims}
    return {"num_stages": 1} if sizes - {"num_heads", "num_kv_heads", "num_seqs"} else None


class Places:
    """Each row's and each key's place in its sequence.

    `seq_q`, `position` int64 (rows,), `seq_k`, `at_k` int64 (keys without padding,). Functions are
    evaluated for padding, and for pairs of different sequences, too. A row of padding has the first
    token's place, and another sequence's key that of the sequence's first.
    """

    def __init__(
        self, batch: Batch, seq_q: Tensor, position: Tensor, seq_k: Tensor, at_k: Tensor, keys: int
    ):
        device, tokens = batch.device, batch.num_tokens
        step_seq = torch.tensor([*batch.seq_ids, 0], device="cpu")[seq_q]
        row = position.clone()
        step_seq[tokens:], row[tokens:] = step_seq[0], row[0]
        padding = torch.full((keys - len(seq_k),), -1, device="cpu")
        self.step_seq, self.row = step_seq.to(device), row.to(device)
        self.seq_q = seq_q.to(device)
        self.seq_k = torch.cat([seq_k, padding]).to(device)
        self.key = torch.cat([at_k, padding.clamp(min=0)]).to(device)

    def of(self, h: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Return b, h, q_idx and kv_idx of a row and a key of the packed batch."""
        own = self.seq_q[q] == self.seq_k[k]
        return self.step_seq[q], h, self.row[q], torch.where(own, self.key[k], 0)


def masked_blocks(
    whole: BlockMask, pointwise: Pointwise, places: Places, inputs: Mapping[str, Tensor], heads: int
) -> BlockMask:
    """Return the mask of which the functions show only some, by asking for every query and key."""
    spec_s = whole.mask_mod
    rows, keys = whole.seq_lengths

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = pointwise.visible(places.of(h, q, k), inputs)
        mine: Tensor = spec_s(b, h, q, k)
        return mine if seen is None else mine & seen

    return blocks_of(visible, heads, rows, keys, places.row.device)


def blocks_of(
    visible: Callable[..., Tensor], heads: int, rows: int, keys: int, device: torch.device
) -> BlockMask:
    """Return what `create_block_mask` does, asking for at most `PAIRS` at a time."""
    step = max(PAIRS // (heads * keys) // BLOCK, 1) * BLOCK
    parts = []
    for start in range(0, rows, step):

        def some(b: Tensor, h: Tensor, q: Tensor, k: Tensor, start: int = start) -> Tensor:
            return visible(b, h, q + start, k)

        height = min(step, rows - start)
        parts.append(create_block_mask(some, 1, heads, height, keys, device=str(device)))

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim=2)

    return BlockMask.from_kv_blocks(
        joined("kv_num_blocks"),
        joined("kv_indices"),
        joined("full_kv_num_blocks"),
        joined("full_kv_indices"),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
    )


def changes(
    pointwise: Pointwise, places: Places, inputs: Mapping[str, Tensor], masked: bool
) -> Callable[..., Tensor] | None:
    """Return the function that changes a score of the packed batch, or None.

    `masked`: the block mask has their masks already.
    """
    hides = bool(pointwise.mask_mods) and not masked
    if pointwise.score_mod is None and not hides:
        return None

    def change(score: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = places.of(h, q, k)
        score = pointwise.score(score, at, inputs)
        seen = pointwise.visible(at, inputs) if hides else None
        return score if seen is None else torch.where(seen, score, -torch.inf)

    return change
