"""What do functions and masks read in a random batch? Each request brings its own, wherever it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from polyattn.conformance.cases.functions import functions, refused
from polyattn.conformance.harness.attention import AttentionHarness
from polyattn.conformance.random_batches.compose import Requests
from polyattn.errors import SpecError
from polyattn.registry.info import BackendInfo
from polyattn.registry.variants import register_variant, variants
from polyattn.runtime.functions.pointwise import Pointwise, example_inputs
from polyattn.runtime.step.step_mask import BlockSparseMask, CustomMask, StepMask
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import AttentionVariant

OF_SEQUENCES = AttentionVariant(
    name="conformance_sequences",
    score_mod="polyattn.conformance.transforms:of_score",
    mask_mod="polyattn.conformance.transforms:of_pair",
    inputs={"sharpness": "float32[num_seqs, num_heads]", "document": "int32[num_seqs, *]"},
    summary="the conformance kit's functions that read each sequence's own inputs",
)
FEATURES = {"custom": "custom_mask", "block_sparse": "block_sparse"}
"""What a backend claims of each kind of mask."""


@st.composite
def with_functions(draw: st.DrawFn, info: BackendInfo, spec: LayerSpec) -> LayerSpec:
    """Draw a layer with functions or masks that the backend serves, in two draws of three."""
    claimed = info.capabilities.features & {"variant", *FEATURES.values()}
    if not claimed or spec.role is Role.CROSS or not draw(st.integers(0, 2)):
        return spec
    if OF_SEQUENCES.name not in variants():
        register_variant(OF_SEQUENCES)
    drawn = [*functions().values(), {"variant": OF_SEQUENCES.name}]
    fields = draw(st.sampled_from(drawn), label="functions")
    wanted = {"variant"} & fields.keys() | {FEATURES[fields[n]] for n in ("mask",) if n in fields}
    try:
        found = spec.replace(**fields)
        served = wanted <= claimed and refused(info, found) is None
    except SpecError:  # sinks beside weights that are no softmax, say
        return spec
    return found if served else spec


@dataclass
class Brought:
    """What a pool's requests bring to their steps.

    - `bits`: of each request its mask, over its new tokens or all its keys (`over`); none: no mask.
    - `block`: rows and keys of a block, where masks are of blocks.
    - `inputs`: what functions read, by name, `dims` the dimension that counts requests.
    """

    requests: Requests
    bits: list[Tensor]
    over: str
    block: tuple[int, int] | None
    inputs: dict[str, Tensor]
    dims: dict[str, int]

    @classmethod
    def of(
        cls, spec: LayerSpec, harness: AttentionHarness, requests: Requests, dice: np.random.Generator
    ) -> Brought:  # fmt: skip
        """Draw what a layer's functions and masks read."""
        pointwise, bits, over, block = Pointwise.of(spec), list[Tensor](), "all", None
        if spec.mask == "custom":
            over = str(dice.choice(["new", "all"]))
        elif spec.mask == "block_sparse":
            block = ((2, 3), (1, spec.block_size or 16))[int(dice.integers(2))]
        for queries, keys in zip(requests.queries, requests.lens, strict=True):
            if spec.mask is not None:
                width = min(queries, keys) if over == "new" else keys
                bits.append(torch.from_numpy(dice.random((queries, width)) < 0.5))
        inputs, dims = dict[str, Tensor](), dict[str, int]()
        if pointwise is not None:
            found = example_inputs(pointwise, spec, harness.generator, len(requests.lens))
            for name, tensor in found.items():
                sizes = pointwise.inputs[name].dims
                if "num_seqs" in sizes:
                    inputs[name], dims[name] = tensor, sizes.index("num_seqs")
        return cls(requests, bits, over, block, inputs, dims)

    def step(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Return a batch's `mask` and `inputs`, of these requests."""
        index = torch.tensor(list(chosen), dtype=torch.int64)
        inputs = {n: t.index_select(self.dims[n], index) for n, t in self.inputs.items()}
        return {"mask": self._mask(chosen), "inputs": inputs}

    def _mask(self, chosen: Sequence[int]) -> StepMask | None:
        if not self.bits:
            return None
        mask = CustomMask.pack([self.bits[i] for i in chosen], self.over)
        if self.block is None:
            return mask
        return BlockSparseMask.of(mask, *self._lens(chosen), self.block)

    def _lens(self, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
        at = list(chosen)
        return self.requests.queries[at].tolist(), self.requests.lens[at].tolist()

    def read(self) -> dict[str, Tensor]:
        """Return all that the reference reads, a request's number being its place in the pool."""
        every = range(len(self.requests.lens))
        step = self.step(every)
        mask = step["mask"]
        of_mask = {} if mask is None else mask.inputs(*self._lens(every), "cpu")
        found: dict[str, Tensor] = step["inputs"] | of_mask
        return found
