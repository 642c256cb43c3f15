"""Does a variant's function couple requests? Runs each one on examples, whole and in parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from polyattn.errors import SpecError
from polyattn.runtime.functions.pointwise import Function, Pointwise, example_inputs, function_of
from polyattn.spec.layer import LayerSpec
from polyattn.spec.variant import FUNCTIONS, TRANSFORMS, AttentionVariant

OF_ELEMENTS = (*TRANSFORMS, "feature_mod")
"""Functions that see a head of a token whole."""

SIZE = 4
"""Sequences, heads, elements, queries and keys of an example: one number, so that sizes can't tell a
dimension that was forgotten from the right one."""
TOY = LayerSpec(num_heads=SIZE, num_kv_heads=SIZE, head_size=SIZE, dtype="float32")
STRANGE = (torch.nan, 1e4, -1e4)
"""What another token's elements become. NaN survives a reduction that multiplies by 0."""
UNKNOWN = "can't run on the example"
ASKS_TRUTH = (
    "asks whether a tensor is true (if, and, or, not, min, max), and it gets many pairs at once; use "
    "torch.where, &, |, ~, torch.minimum"
)
Call = Callable[[list[Tensor]], Tensor]


@lru_cache(maxsize=256)
def check_coupling(variant: AttentionVariant, spec: LayerSpec = TOY) -> None:
    """Check the dependencies of a variant's functions.

    Functions of elements may depend on one head of one token, and functions of scores on one pair.

    A function that can't run on the examples, for example because its tensors have a layer's sizes, is
    checked when a layer of that `spec` is built. Raises `SpecError`.
    """
    with torch.device("cpu"):  # the caller's default may be another, such as the meta device
        _check(variant, spec)


def _check(variant: AttentionVariant, spec: LayerSpec) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = example_inputs(Pointwise.of_variant(variant), spec, generator, num_seqs=SIZE)
    for which in FUNCTIONS:
        function = function_of(variant, which)
        if function is None:
            continue
        example = _example(which, spec, generator)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            problem = _problem(function, example, inputs, torch.device(device))
            if problem == UNKNOWN:
                continue
            if problem:
                raise SpecError(f"variant {variant.name!r}: {which} {problem}")
            break


def _example(which: str, spec: LayerSpec, generator: torch.Generator) -> list[Tensor]:
    """Return a function's arguments, all of as many dimensions, the values first where it has any."""
    if which in OF_ELEMENTS:
        heads = spec.num_kv_heads if which in ("key_mod", "value_mod") else spec.num_heads
        size = spec.v_head_size if which in ("value_mod", "output_mod") else spec.head_size
        values = torch.randn(SIZE, heads, size, generator=generator, dtype=torch.float32)
        tokens = torch.arange(SIZE)[:, None, None]
        if which == "feature_mod":
            return [values]
        return [values, tokens, torch.arange(heads)[:, None], tokens + 1, torch.arange(size)]
    sizes = (SIZE, spec.num_heads, SIZE, SIZE)
    places = [torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate(sizes)]
    if which == "mask_mod":
        return places
    return [torch.randn(sizes, generator=generator, dtype=torch.float32), *places]


def _problem(
    function: Function, example: list[Tensor], inputs: dict[str, Tensor], device: torch.device
) -> str | None:
    tensors = {name: tensor.to(device) for name, tensor in inputs.items()}
    args = [tensor.to(device) for tensor in example]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in args))

    def call(parts: list[Tensor]) -> Tensor:
        with torch.no_grad():
            result = function(*parts, inputs=tensors)
        if result is None:
            raise SpecError("returns None; return a tensor")
        result = torch.as_tensor(result)
        size = torch.broadcast_shapes(*(tensor.shape for tensor in parts))
        return result.to(device, torch.float64).expand(size)

    copies = [tensor.clone() for tensor in args]
    try:
        whole = call(copies)
    except SpecError as error:
        return str(error)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        # a layer's sizes, or another device, may do
        return ASKS_TRUTH if "Boolean value of Tensor" in str(error) else UNKNOWN
    if not all(map(torch.equal, copies, args)):
        return "writes to its arguments; return new tensors"
    if all(_alone(call, args, whole, unit) for unit in _units(function, shape)):
        return None
    what, remedy = "one pair of query and key", "a function of scores reduces nothing"
    if function.which in OF_ELEMENTS:
        what = "one head of one token"
        remedy = "reduce over a head's elements only, as in .mean(-1, keepdim=True)"
    return f"gives {what} other results beside others, and would couple requests; {remedy}"


def _units(function: Function, shape: torch.Size) -> Iterator[tuple[slice, ...]]:
    """Heads of tokens, or scores: the first and the last of each dimension."""
    free = shape[:-1] if function.which in OF_ELEMENTS else shape
    for at in itertools.product(*(sorted({0, n - 1}) for n in free)):
        yield tuple(slice(i, i + 1) for i in at)


def _alone(call: Call, args: list[Tensor], whole: Tensor, unit: tuple[slice, ...]) -> bool:
    """Whether a unit has the same results alone, and the others don't depend on it."""
    parts = [_part(tensor, unit, whole.dim()) for tensor in args]
    try:
        alone = call(parts)
    except (RuntimeError, IndexError):
        return False  # it depends on the number of units
    if not _close(alone, whole[unit]):
        return False
    if not args[0].is_floating_point():
        return True
    others = torch.ones(whole.shape, dtype=torch.bool, device=whole.device)
    others[unit] = False
    for strange in STRANGE:
        values = args[0].clone()
        values[unit] = strange
        if not _close(call([values, *args[1:]])[others], whole[others]):
            return False
    return True


def _part(tensor: Tensor, unit: tuple[slice, ...], dims: int) -> Tensor:
    lead = dims - tensor.dim()
    for dim, at in enumerate(unit):
        if dim >= lead and tensor.shape[dim - lead] > 1:
            tensor = tensor.narrow(dim - lead, at.start, 1)
    return tensor


def _close(value: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(value, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
