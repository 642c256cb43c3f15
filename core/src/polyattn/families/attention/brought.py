"""What do a step's sequences bring? Masks, and the inputs that a variant's functions read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyattn.runtime.functions.pointwise import Pointwise, example_inputs
from polyattn.runtime.step.step_mask import BlockSparseMask, CustomMask, StepMask
from polyattn.spec.layer import LayerSpec
from polyattn.workload.dice import Dice
from polyattn.workload.steps import Lengths, lens_of


@dataclass(frozen=True)
class Brought:
    """Sequences' own inputs of a step: masks, and inputs of a variant's functions.

    - `kind`: of the masks, as `LayerSpec.mask` has it.
    - `bits`: of each sequence its mask, over its new tokens or all its keys (`over`).
    - `block`: rows and keys of a block, where masks are of blocks.
    - `inputs`: what functions read of each sequence, by name; `dims`: which dimension counts them.
    """

    lengths: Lengths
    kind: str | None
    bits: list[Tensor]
    over: str
    block: tuple[int, int] | None
    inputs: dict[str, Tensor]
    dims: dict[str, int]

    @classmethod
    def of(cls, spec: LayerSpec, lengths: Lengths, dice: Dice, page: int | None) -> Brought:
        """Draw the inputs of a step's sequences: half of the keys, or of the blocks.

        `page`: a block is so many keys, seen by four queries.
        """
        bits, over, block = list[Tensor](), "all", None
        if spec.mask == "custom":
            over = ("new", "all")[dice.integer(0, 2)]
        elif spec.mask == "block_sparse":
            block = (4, page) if page else ((2, 3), (1, 16))[dice.integer(0, 2)]
        height, width = block or (1, 1)
        for queries, keys in lengths if spec.mask is not None else ():
            seen = min(queries, keys) if over == "new" else keys
            drawn = dice.chance(-(-queries // height), -(-seen // width)) < 0.5
            drawn = drawn.repeat_interleave(height, 0).repeat_interleave(width, 1)
            bits.append(drawn[:queries, :seen])
        pointwise, inputs, dims = Pointwise.of(spec), dict[str, Tensor](), dict[str, int]()
        if pointwise is not None:
            examples = example_inputs(pointwise, spec, dice.generator, len(lengths))
            for name, tensor in examples.items():
                sizes = pointwise.inputs[name].dims
                if "num_seqs" in sizes:
                    inputs[name], dims[name] = tensor, sizes.index("num_seqs")
        return cls(lengths, spec.mask, bits, over, block, inputs, dims)

    def picked(self, requests: Sequence[int]) -> Brought:
        """Return what some of the sequences bring."""
        index = torch.tensor(list(requests), dtype=torch.int64, device="cpu")
        return replace(
            self,
            lengths=[self.lengths[i] for i in requests],
            bits=[self.bits[i] for i in requests] if self.bits else [],
            inputs={n: t.index_select(self.dims[n], index) for n, t in self.inputs.items()},
        )

    def mask(self) -> StepMask | None:
        """Return the step's mask."""
        if self.kind is None:
            return None
        whole = CustomMask.pack(self.bits, self.over)
        if self.block is None:
            return whole
        return BlockSparseMask.of(whole, *lens_of(self.lengths), self.block)

    def tensors(self, device: torch.device) -> dict[str, Tensor]:
        """Return what functions read of the step's sequences."""
        return {name: tensor.to(device) for name, tensor in self.inputs.items()}
