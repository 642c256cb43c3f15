"""How are the scores of a tile changed? A layer's variant and its step's mask, as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError, shown
from polyattn.registry.discovery import generation
from polyattn.registry.info import function_at
from polyattn.registry.variants import variant_named, variant_of
from polyattn.runtime.functions import variants as core_variants
from polyattn.runtime.inputs import as_tensor
from polyattn.runtime.parameters import Weight
from polyattn.spec.kinds import AttentionKind, Role
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import AttentionVariant, VariantInput

if TYPE_CHECKING:
    from polyattn.runtime.step.batch import Batch

INPUT_DTYPES = {
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
_COLUMN = VariantInput("int64", ("num_seqs",))
_BITS = {"mask_bits": VariantInput("bool", ("*",))}
_STEP_MASKS: dict[str, tuple[Callable[..., Tensor], dict[str, VariantInput]]] = {
    "custom": (
        core_variants.step_mask,
        _BITS | dict.fromkeys(("mask_start", "mask_width", "mask_query", "mask_key"), _COLUMN),
    ),
    "block_sparse": (
        core_variants.block_mask,
        _BITS
        | dict.fromkeys(("mask_start", "mask_width", "mask_query"), _COLUMN)
        | dict.fromkeys(("mask_rows", "mask_columns"), VariantInput("int32")),
    ),
}


@dataclass(frozen=True)
class Function:
    """A function of one pair of query and key.

    Attributes:
        call: the function.
        names: the inputs that it takes, by name.
        which: its place in a variant (`"score_mod"`).
        source: its hand-written source in the backend's language, or None.

    Examples:
        >>> Function(lambda score, b, h, q, k, slope: score * slope, ("slope",)).names
        ('slope',)

    """

    call: Callable[..., Any]
    names: tuple[str, ...]
    which: str = ""
    source: str | None = None

    def __call__(self, *places: Tensor, inputs: Mapping[str, Tensor]) -> Any:
        """Return what the function returns.

        Args:
            places: the score or element and its indices, which broadcast.
            inputs: the variant's inputs by name.

        """
        return self.call(*places, **{name: inputs[name] for name in self.names})


@dataclass(frozen=True)
class Pointwise:
    """A layer's functions of scores.

    Attributes:
        score_mod: takes (score, b, h, q_idx, kv_idx); None: scores stay.
        mask_mods: take (b, h, q_idx, kv_idx); a query sees a key if all hold.
        softmax: whether the weights are a softmax of the scores.
        inputs: all that the functions read, by name.

    Examples:
        >>> variant = AttentionVariant(name="near", mask_mod=lambda b, h, q, k: q - k < 2)
        >>> pointwise = Pointwise.of_variant(variant)
        >>> places = torch.tensor(0), torch.tensor(0), torch.tensor(5), torch.arange(6)
        >>> pointwise.visible(places, {}).tolist()
        [False, False, False, False, True, True]

    """

    score_mod: Function | None
    mask_mods: tuple[Function, ...]
    softmax: bool
    inputs: dict[str, VariantInput]

    @classmethod
    def of(cls, spec: LayerSpec, language: str = "") -> Pointwise | None:
        """Return a layer's functions; None if it has neither a variant nor a step's mask.

        Args:
            spec: the layer.
            language: of the code that will be generated, if any: `"triton"`.

        Raises:
            SpecError: a function can't be imported or read.

        """
        variant = variant_of(spec)
        if variant is None and spec.mask is None:
            return None
        pointwise = None if variant is None else cls.of_variant(variant, language)
        masks = () if pointwise is None else pointwise.mask_mods
        inputs = {} if pointwise is None else dict(pointwise.inputs)
        if spec.mask is not None:
            call, taken = _STEP_MASKS[spec.mask]
            masks, inputs = (*masks, Function(call, tuple(taken))), inputs | taken
        score = None if pointwise is None else pointwise.score_mod
        return cls(score, masks, pointwise is None or pointwise.softmax, inputs)

    @classmethod
    def of_variant(cls, variant: AttentionVariant, language: str = "") -> Pointwise:
        """Return a variant's functions.

        Args:
            variant: a registered one.
            language: of the code that will be generated, if any: `"triton"`.

        Raises:
            SpecError: a function can't be imported or read.

        """
        score, mask = (function_of(variant, name, language) for name in ("score_mod", "mask_mod"))
        masks = () if mask is None else (mask,)
        return cls(score, masks, variant.softmax, variant.parsed)

    @property
    def mask_inputs(self) -> frozenset[str]:
        """Names of the masks' inputs."""
        return frozenset(name for mask in self.mask_mods for name in mask.names)

    def score(
        self, score: Tensor, places: tuple[Tensor, ...], inputs: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the changed scores, in the shape and dtype of `score`.

        Args:
            score: the scaled, capped and biased scores.
            places: b, h, q_idx and kv_idx, which broadcast to the scores.
            inputs: the variant's inputs by name.

        """
        if self.score_mod is None:
            return score
        changed = self.score_mod(score, *places, inputs=inputs)
        changed = torch.as_tensor(changed, dtype=score.dtype, device=score.device)
        return changed if changed.shape == score.shape else changed.expand_as(score)

    def visible(self, places: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> Tensor | None:
        """Return whether the masks show these pairs, bool; None if there is no mask.

        Args:
            places: b, h, q_idx and kv_idx, which broadcast.
            inputs: the variant's inputs by name.

        """
        seen = None
        for mask in self.mask_mods:
            result = mask(*places, inputs=inputs)
            result = torch.as_tensor(result, dtype=torch.bool, device=places[0].device)
            seen = result if seen is None else seen & result
        return seen


def function_of(variant: AttentionVariant, which: str, language: str = "") -> Function | None:
    """Return one of a variant's functions (`"query_mod"`) to call, or None. Raises `SpecError`."""
    function = getattr(variant, which)
    if function is None:
        return None
    function = function_at(f"variant {variant.name!r}", which, function)
    return Function(function, variant.names_of(which, function), which, variant.source(language))


def feature_mod(spec: LayerSpec) -> Callable[[Tensor], Tensor] | None:
    """Return phi of a layer of linear attention that its variant has; None where it has none.

    Args:
        spec: a layer of kind `"phi_linear"`.

    Raises:
        SpecError: the function can't be imported.

    Examples:
        >>> recurrent = RecurrentSpec(feature_map="relu")
        >>> feature_mod(LayerSpec(kind="phi_linear", num_heads=2, head_size=8, recurrent=recurrent))

    """
    variant = variant_of(spec)
    function = None if variant is None else function_of(variant, "feature_mod")
    return None if function is None else function.call


def layer_inputs(
    spec: LayerSpec, values: Mapping[str, Any] | None, device: torch.device
) -> tuple[dict[str, Weight], tuple[str, ...]]:
    """Return the variant's inputs that a layer brings, and the names of those that its steps must bring.

    Tensors are referenced. Raises `SpecError`.
    """
    pointwise = Pointwise.of(spec)
    declared = {} if pointwise is None else pointwise.inputs
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
    weights = {}
    if values is not None and not isinstance(values, Mapping):
        raise SpecError(f"inputs={shown(values)} must map names to tensors or numbers")
    for name, value in (values or {}).items():
        if name not in declared:
            raise SpecError(
                f"inputs has {name!r}, which {spec} doesn't take; it takes "
                f"{', '.join(declared) or 'none'}"
            )
        tensor = as_tensor(f"inputs[{name!r}]", value, SpecError)
        if not declared[name].fits(tuple(tensor.shape), sizes):
            raise SpecError(
                f"inputs[{name!r}] has shape {tuple(tensor.shape)}; it must be {declared[name]}"
            )
        weights[name] = Weight(name, tensor, device, INPUT_DTYPES[declared[name].dtype])
    return weights, tuple(name for name in declared if name not in weights)


@lru_cache(maxsize=256)
def _declared(variant: str | None, mask: str | None, generation: int) -> dict[str, VariantInput]:
    declared = {} if variant is None else variant_named(variant).parsed
    return declared if mask is None else declared | _STEP_MASKS[mask][1]


def check_step_mask(spec: LayerSpec, batch: Batch) -> None:
    """Check that a step brings the mask that its layer needs. Raises `BatchError`.

    Cross-attention has none, because a step's mask is over its own tokens' keys.
    """
    kind = None if batch.mask is None else batch.mask.kind
    if spec.mask is None and kind is not None and spec.role is not Role.CROSS:
        plain = spec.kind is AttentionKind.ATTENTION
        remedy = f"select for spec.replace(mask={kind!r}), or " if plain else ""
        raise BatchError(
            f"the step brings a mask of kind {kind!r}, and the layer has mask=None and would show every "
            f"key: {remedy}plan a batch without it"
        )
    if spec.mask is not None and kind != spec.mask:
        wanted = {"custom": "CustomMask", "block_sparse": "BlockSparseMask"}[spec.mask]
        raise BatchError(
            f"mask is {'missing' if kind is None else f'of kind {kind!r}'}, and the layer has "
            f"mask={spec.mask!r}, which each step brings: Batch(..., mask={wanted}(...))"
        )


def check_step_inputs(spec: LayerSpec, names: tuple[str, ...], batch: Batch) -> None:
    """Check that a step brings every input that its layer doesn't. Raises `BatchError`."""
    for name in names:
        declared = _declared(spec.variant, spec.mask, generation())[name]
        if name not in batch.inputs:
            raise BatchError(
                f"input {name!r} ({declared}) is missing: pass it to the layer, Attention(group, "
                f"inputs={{{name!r}: ...}}), or with the step, Batch(..., inputs=...)"
            )
        tensor, wanted = batch.inputs[name], INPUT_DTYPES[declared.dtype]
        sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads}
        fits = declared.fits(tuple(tensor.shape), sizes | {"num_seqs": batch.num_seqs})
        if tensor.dtype is not wanted or not fits:
            raise BatchError(
                f"input {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be "
                f"{declared}: convert it, or declare in inputs= what it is"
            )


def example_inputs(
    pointwise: Pointwise, spec: LayerSpec, generator: torch.Generator, num_seqs: int
) -> dict[str, Tensor]:
    """Return random tensors for a variant's inputs: normal floats, integers of 0 or 1, random bits.

    Verification and the conformance kit use them.
    """
    sizes = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "num_seqs": num_seqs}
    inputs_by_name = {}
    for name, wanted in pointwise.inputs.items():
        if name.startswith("mask_") and spec.mask is not None:
            continue
        shape = [sizes.get(d, ANY) if isinstance(d, str) else d for d in wanted.dims]
        if wanted.dtype == "float32":
            inputs_by_name[name] = torch.randn(
                shape, generator=generator, dtype=torch.float32, device="cpu"
            )
        else:
            low = 0 if shape else 1  # a lone integer may be a divisor
            integers = torch.randint(low, 2, shape, generator=generator, device="cpu")
            inputs_by_name[name] = integers.to(INPUT_DTYPES[wanted.dtype])
    return inputs_by_name


ANY = 9
"""The size of an example's dimension that may be any."""
