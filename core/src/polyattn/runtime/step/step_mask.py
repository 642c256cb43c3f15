"""Which keys does this step's mask show? Packed booleans or rows of blocks, each sequence its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import BatchError, shown
from polyattn.runtime.inputs import as_tensor, check_is_tensor
from polyattn.runtime.step.integers import integers


class StepMask(ABC):
    """A mask that a batch brings beside the layer's own mask.

    `kind` is the `LayerSpec.mask` that it is for.
    """

    kind: str

    @abstractmethod
    def inputs(self, query_lens: list[int], lens: list[int], device: Any) -> dict[str, Tensor]:
        """Return the tensors that `functions.variants` reads of it, by name.

        Args:
            query_lens: query tokens of each sequence.
            lens: keys of each sequence.
            device: where the tensors go.

        Raises:
            BatchError: the mask doesn't match the lengths, or names a block that its sequence lacks.

        """


class CustomMask(StepMask):
    """Packed boolean masks: each sequence has a row for each of its queries, True where it sees a key.

    Args:
        bits: bool (total,), the sequences' masks one after another, each row by row.
        over: `"new"`: a mask is (query_len, query_len) over the step's own tokens, and every earlier
            key is seen (trees of drafted tokens). `"all"`: it is (query_len, seq_len).

    Raises:
        BatchError: `bits` isn't such a tensor, or `over` is another word.

    Examples:
        >>> CustomMask.tree([[-1, 0, 0]]).bits.view(3, 3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 0, 1]], dtype=torch.int32)

    """

    kind = "custom"
    shapes: list[tuple[int, ...]] | None = None
    """Of each sequence's mask, where `pack` got them."""

    def __init__(self, bits: Tensor, over: str = "new"):
        if over not in ("new", "all"):
            raise BatchError(f"over={shown(over)} must be 'new' (the step's tokens) or 'all' keys")
        if not isinstance(bits, Tensor) or bits.dtype is not torch.bool or bits.dim() != 1:
            raise BatchError("bits must be a bool tensor of one dimension, the masks row by row")
        self.bits, self.over = bits, over

    @classmethod
    def pack(cls, masks: Sequence[Tensor], over: str = "new") -> CustomMask:
        """Return the packed masks of a step's sequences.

        Args:
            masks: for each sequence bool (query_len, keys), True where a query sees a key.
            over: as in `CustomMask`.

        Raises:
            BatchError: a mask isn't a tensor of booleans.

        """
        for index, mask in enumerate(masks):
            check_is_tensor(f"masks[{index}]", mask)
            if mask.dtype is not torch.bool or mask.dim() != 2:
                raise BatchError(
                    f"masks[{index}] is {mask.dtype} of shape {tuple(mask.shape)}; it must be "
                    "torch.bool of shape (query_len, keys), True where a query sees a key"
                )
        rows = [mask.flatten() for mask in masks]
        packed = cls(
            torch.cat(rows) if rows else torch.zeros(0, dtype=torch.bool, device="cpu"), over
        )
        packed.shapes = [tuple(mask.shape) for mask in masks]
        return packed

    @classmethod
    def tree(cls, parents: Sequence[Sequence[int]]) -> CustomMask:
        """Return the mask of trees of drafted tokens: a token sees its ancestors, itself and the context.

        Args:
            parents: for each sequence the parents of its tokens, as indices among them; -1 for a token
                that follows the context. A parent stands before its children.

        Raises:
            BatchError: a parent doesn't stand before its child.

        """
        masks = []
        for index, family in enumerate(parents):
            places = integers(f"parents[{index}]", family)
            mask = torch.eye(len(places), dtype=torch.bool, device="cpu")
            for token, parent in enumerate(places):
                if not -1 <= parent < token:
                    raise BatchError(
                        f"parents[{index}][{token}]={parent} must be a token before it, or -1"
                    )
                if parent >= 0:
                    mask[token] |= mask[parent]
            masks.append(mask)
        return cls.pack(masks)

    @classmethod
    def prefix_lm(
        cls, prefixes: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> CustomMask:
        """Return the mask of a prefix-LM: every query sees the prefix, and the rest is causal.

        For layers with `causal=False`.

        Args:
            prefixes: tokens of each sequence's prefix.
            query_lens: query tokens of each sequence.
            seq_lens: keys of each sequence.

        Raises:
            BatchError: the lists differ in length, or a number is negative.

        """
        masks = []
        counts = _counts(prefixes=prefixes, query_lens=query_lens, seq_lens=seq_lens)
        for prefix, queries, keys in zip(*counts, strict=True):
            query = torch.arange(keys - queries, keys, device="cpu")[:, None]
            key = torch.arange(keys, device="cpu")
            masks.append((key < prefix) | (key <= query))
        return cls.pack(masks, "all")

    @classmethod
    def documents(cls, documents: Sequence[Sequence[int]], query_lens: Sequence[int]) -> CustomMask:
        """Return the mask of documents packed into sequences: a token sees those of its own document.

        Args:
            documents: for each sequence the document of every key, as any integers.
            query_lens: query tokens of each sequence.

        Raises:
            BatchError: the lists differ in length, or an entry isn't an integer.

        """
        masks = []
        ids = [integers(f"documents[{i}]", each) for i, each in enumerate(documents)]
        (queries_of, _) = _counts(query_lens=query_lens, documents=[len(each) for each in ids])
        for each, queries in zip(ids, queries_of, strict=True):
            keys = torch.tensor(each, dtype=torch.int64, device="cpu")
            masks.append(keys[len(keys) - queries :, None] == keys)
        return cls.pack(masks, "all")

    def of_sequences(self, query_lens: list[int], lens: list[int]) -> list[tuple[int, int]]:
        """Return the shape of each sequence's mask.

        Args:
            query_lens: query tokens of each sequence.
            lens: keys of each sequence.

        Raises:
            BatchError: the mask has other shapes.

        """
        pairs = list(zip(query_lens, lens, strict=True))
        if self.over == "new":
            # A padding row has a query token and no key.
            pairs = [(q, min(q, n)) for q, n in pairs]
        held = sum(q * k for q, k in pairs)
        if held != len(self.bits):
            raise BatchError(
                f"mask has {len(self.bits)} bits; masks over {self.over} keys of queries "
                f"{query_lens[:4]}… and lengths {lens[:4]}… have {held}"
            )
        for index, (theirs, ours) in enumerate(zip(self.shapes or (), pairs, strict=False)):
            if theirs != ours and (0 not in theirs or 0 not in ours):
                raise BatchError(
                    f"masks[{index}] has shape {theirs}; over {self.over} keys it must be {ours}, a row "
                    "for each query"
                )
        return pairs

    def inputs(self, query_lens: list[int], lens: list[int], device: Any) -> dict[str, Tensor]:
        pairs = self.of_sequences(query_lens, lens)
        sizes = [q * k for q, k in pairs]
        before = [n - k for (_, k), n in zip(pairs, lens, strict=True)]
        context = [n - q for q, n in zip(query_lens, lens, strict=True)]
        starts = [0, *accumulate(sizes)][:-1]
        return {"mask_bits": _ended(self.bits.to(device))} | _columns(
            device,
            mask_start=starts,
            mask_width=[k for _, k in pairs],
            mask_query=context,
            mask_key=before,
        )


class BlockSparseMask(StepMask):
    """Block-sparse rows (BSR): each row of queries has the blocks of keys that it sees.

    Args:
        indptr: (rows + 1,): row r sees blocks `indices[indptr[r] : indptr[r + 1]]`. The rows of all
            sequences follow one another, ceil(query_len / Br) for each.
        indices: (blocks,): numbers of blocks.
        block: (Br, Bc): Br neighbouring queries, counted from the sequence's first in the step, share a
            row; a block is Bc neighbouring keys, counted from the sequence's first. Both may be 1.

    Raises:
        BatchError: the numbers contradict one another.

    Examples:
        >>> BlockSparseMask([0, 2], [0, 2], block=(1, 16)).block
        (1, 16)

    """

    kind = "block_sparse"

    def __init__(
        self,
        indptr: Sequence[int] | Tensor,
        indices: Sequence[int] | Tensor,
        block: tuple[int, int],
    ):
        self.indptr, self.indices = integers("indptr", indptr), integers("indices", indices)
        self.block = _checked(block)
        steps = zip(self.indptr, self.indptr[1:], strict=False)
        if self.indptr[:1] != [0] or any(b < a for a, b in steps):
            raise BatchError(f"indptr={self.indptr[:4]}… must start with 0 and never decrease")
        if self.indptr[-1] != len(self.indices):
            raise BatchError(
                f"indptr ends with {self.indptr[-1]}, and indices has {len(self.indices)} entries"
            )

    @classmethod
    def of(
        cls, mask: CustomMask, query_lens: list[int], seq_lens: list[int], block: tuple[int, int]
    ) -> BlockSparseMask:
        """Return the blocks with visible keys of a mask. A tree over new tokens includes the context.

        It is exactly that mask if its borders are blocks' borders, as always for blocks of 1 x 1.

        Args:
            mask: the mask.
            query_lens: query tokens of each sequence.
            seq_lens: keys of each sequence.
            block: (query rows, keys) of a block.

        Raises:
            BatchError: the mask doesn't have these lengths.

        """
        if not isinstance(mask, CustomMask):
            raise BatchError(f"mask={shown(mask)} must be a CustomMask")
        query_lens, seq_lens = _counts(query_lens=query_lens, seq_lens=seq_lens)
        shapes = mask.of_sequences(query_lens, seq_lens)
        height, width = _checked(block)
        indptr, indices, at = [0], list[int](), 0
        for (queries, keys), length in zip(shapes, seq_lens, strict=True):
            bits = mask.bits[at : at + queries * keys].view(queries, keys)
            bits = torch.cat([bits.new_ones(queries, length - keys), bits], 1)
            at += queries * keys
            for first in range(0, queries, height):
                seen = bits[first : first + height].any(0).nonzero()[:, 0] // width
                indices += seen.unique().tolist()
                indptr.append(len(indices))
        return cls(indptr, indices, block)

    @classmethod
    def sliding_window(
        cls, window: int, query_lens: list[int], seq_lens: list[int], block: tuple[int, int]
    ) -> BlockSparseMask:
        """Return the blocks that contain each query and the `window` - 1 keys before it.

        It is exactly that window for blocks of 1 x 1; for others set the spec's `sliding_window` too.

        Args:
            window: keys that a query sees, itself included.
            query_lens: query tokens of each sequence.
            seq_lens: keys of each sequence.
            block: (query rows, keys) of a block.

        Raises:
            BatchError: the window is below 1.

        """
        if type(window) is not int or window < 1:
            raise BatchError(f"window={shown(window)} must be 1 or more: a query sees itself")
        height, width = _checked(block)
        query_lens, seq_lens = _counts(query_lens=query_lens, seq_lens=seq_lens)
        indptr, indices = [0], list[int]()
        for queries, keys in zip(query_lens, seq_lens, strict=True):
            for first in range(keys - queries, keys, height):
                last = min(first + height, keys) - 1
                indices += range(max(0, first - window + 1) // width, last // width + 1)
                indptr.append(len(indices))
        return cls(indptr, indices, block)

    @classmethod
    def of_pages(cls, pages: Sequence[Sequence[int]], page_size: int) -> BlockSparseMask:
        """Return the mask of decodes that each read some of their sequence's pages.

        As in Quest (Tang et al., 2024).

        Args:
            pages: for each sequence the numbers of its pages, counted from its first key.
            page_size: tokens of a page.

        Raises:
            BatchError: a number isn't a page.

        """
        indptr = [0, *accumulate(len(row) for row in pages)]
        return cls(indptr, [page for row in pages for page in row], (1, page_size))

    def inputs(self, query_lens: list[int], lens: list[int], device: Any) -> dict[str, Tensor]:
        height, width = self.block
        rows = [-(-q // height) for q in query_lens]
        if sum(rows) != len(self.indptr) - 1:
            raise BatchError(
                f"indptr has {len(self.indptr) - 1} rows; queries {query_lens[:4]}… in rows of {height} "
                f"have {sum(rows)}"
            )
        widths = [-(-n // width) for n in lens]
        starts = [0, *accumulate(r * w for r, w in zip(rows, widths, strict=True))]
        bits = torch.zeros(starts[-1], dtype=torch.bool, device="cpu")
        row = 0
        for count, blocks, start in zip(rows, widths, starts, strict=False):
            for local in range(count):
                mine = self.indices[self.indptr[row] : self.indptr[row + 1]]
                if any(not 0 <= block < blocks for block in mine):
                    raise BatchError(
                        f"row {row} of the mask names block {max(mine, key=abs)}; its sequence has "
                        f"{blocks} blocks of {width} keys"
                    )
                bits[
                    torch.tensor(mine, dtype=torch.int64, device="cpu") + start + local * blocks
                ] = True
                row += 1
        context = [n - q for q, n in zip(query_lens, lens, strict=True)]
        sizes = {"mask_rows": height, "mask_columns": width}
        return (
            {"mask_bits": _ended(bits.to(device))}
            | _columns(device, mask_start=starts[:-1], mask_width=widths, mask_query=context)
            | {n: torch.tensor(v, dtype=torch.int32, device=device) for n, v in sizes.items()}
        )


def _checked(block: tuple[int, int]) -> tuple[int, int]:
    """Return a block's size. Raises `BatchError`."""
    if (
        not isinstance(block, tuple | list)
        or len(block) != 2
        or any(type(n) is not int or n < 1 for n in block)
    ):
        raise BatchError(f"block={shown(block)} must be (query rows, keys), 1 or more each")
    height, width = block
    return height, width


def _counts(**counts: Sequence[int]) -> list[list[int]]:
    """Return counts of tokens of as many sequences each. Raises `BatchError`."""
    by_name = {name: integers(name, values) for name, values in counts.items()}
    first = next(iter(by_name))
    for name, values in by_name.items():
        if len(values) != len(by_name[first]):
            raise BatchError(
                f"{name} has {len(values)} entries and {first} {len(by_name[first])}; both have one for "
                "each sequence"
            )
        if min(values, default=0) < 0:
            raise BatchError(f"{name}={shown(values)} must be 0 or positive integers")
    return list(by_name.values())


def _ended(bits: Tensor) -> Tensor:
    """Return the bits and one more: functions are evaluated for padding rows, too, which have none."""
    return torch.cat([bits, bits.new_zeros(1)])


def _columns(device: Any, **columns: list[int]) -> dict[str, Tensor]:
    return {
        name: torch.tensor(values, dtype=torch.int64, device=device)
        for name, values in columns.items()
    }


def step_inputs(
    inputs: Mapping[str, Any] | None,
    mask: StepMask | None,
    query_lens: list[int],
    lens: list[int],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return a batch's inputs by name, on its device, with its mask's tensors. Raises `BatchError`."""
    tensors = {}
    if inputs is not None and not isinstance(inputs, Mapping):
        raise BatchError(f"inputs={shown(inputs)} must map names to tensors or numbers")
    for name, value in (inputs or {}).items():
        if not isinstance(name, str):
            raise BatchError(f"inputs has {shown(name)}; its keys are the variant's names")
        tensor = as_tensor(f"inputs[{name!r}]", value)
        if name.startswith("mask_") and mask is not None:
            raise BatchError(f"inputs[{name!r}]: that name is the step's mask's; rename it")
        tensors[name] = tensor.to(device)
    if mask is None:
        return tensors
    if not isinstance(mask, StepMask):
        raise BatchError(f"mask={shown(mask)} must be a CustomMask or a BlockSparseMask")
    return tensors | mask.inputs(query_lens, lens, device)
