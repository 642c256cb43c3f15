"""How near are formats of cached rows to other implementations? `python tests/format_accuracy.py`.

Prints the table of `benchmarks/results/formats.md`: 4,096 rows of normal numbers, by gguf and torchao
where they have the format, else by the formula of its paper or engine in float64. An error is the root
of the squared error over the squared norm.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from polyattn import RowFormat, row_formats
from polyattn.runtime.cache.rows import decoded, encoded, function_of
from published_formats import PUBLISHED, SIZES
from torch import Tensor

HEAD = """| format | bytes, of numbers | error | beside | its error | equal numbers | lines |
| --- | ---: | ---: | --- | ---: | ---: | ---: |"""
LINES = 40
"""The most that a format may take."""


def by_gguf(kind: str, x: Tensor) -> Tensor:
    """What the package `gguf` makes of rows, in a type of ggml's."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    type_ = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(x.numpy(), type_), type_))


def by_mx(x: Tensor) -> Tensor:
    """torchao's MXFP4, its scales by OCP's section 6.3."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode  # type: ignore[import-untyped]

    made = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.FLOOR)
    found: Tensor = made.dequantize(torch.float32)
    return found


def by_nvfp4(x: Tensor) -> Tensor:
    """torchao's NVFP4 without a scale of the tensor's."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor  # type: ignore[import-untyped]

    found: Tensor = NVFP4Tensor.to_nvfp4(x).dequantize(torch.float32)
    return found


def by_row(x: Tensor) -> Tensor:
    """torchao's int8, a scale a row."""
    from torchao.quantization import quant_primitives as ao  # type: ignore[import-untyped]

    whole, ends = (1, x.shape[-1]), (-127, 127)
    scale, zero = ao.choose_qparams_affine(
        x, ao.MappingType.SYMMETRIC, whole, torch.int8, *ends, eps=1e-12, scale_dtype=torch.float32
    )
    codes = ao.quantize_affine(x, whole, scale, zero, torch.int8, *ends)
    found: Tensor = ao.dequantize_affine(codes, whole, scale, zero, torch.int8, *ends)
    return found


def by_row_of_e4m3(x: Tensor) -> Tensor:
    """torchao's e4m3, a scale a row."""
    from torchao.quantization import quant_primitives as ao  # type: ignore[import-untyped]

    scale = ao._choose_scale_float8(x, [1, x.shape[-1]], torch.float8_e4m3fn)
    codes = ao._quantize_affine_float8(x, scale, torch.float8_e4m3fn)
    found: Tensor = ao._dequantize_affine_float8(codes, scale, torch.float32)
    return found


OTHERS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "int4": ("gguf 0.19's Q4_0", lambda x: by_gguf("Q4_0", x)),
    "mxfp4": ("torchao 0.18's MXFP4", by_mx),
    "nvfp4": ("torchao 0.18's NVFP4", by_nvfp4),
    "int8_rows": ("torchao 0.18's int8, a scale a row", by_row),
    "e4m3_rows": ("torchao 0.18's e4m3, a scale a row", by_row_of_e4m3),
    "kivi4": ("KIVI's section 3.1", PUBLISHED["kivi4"]),
    "kivi2": ("KIVI's section 3.1", PUBLISHED["kivi2"]),
    "fp8_ds_mla": ("vLLM's formula", PUBLISHED["fp8_ds_mla"]),
    "fp8_ds_v4": ("FlashMLA's formula", PUBLISHED["fp8_ds_v4"]),
}
PROMISED = {"turboquant4": ("TurboQuant's theorem 1: 0.009 squared", 0.009**0.5)}
"""What a paper says of its error, where its rows depend on a random matrix."""


def row_of(format: RowFormat) -> str:
    """Return the table's row of a format."""
    (size,) = SIZES.get(format.name, (128,))
    x = torch.randn(4096, size, generator=torch.Generator().manual_seed(0))
    ours = decoded(encoded(x, format), format, size)
    start = f"| `{format.name}` | {format.row_bytes(size)} of {size} | {_error(ours, x):.5f}"
    if format.name in PROMISED:
        beside, error = PROMISED[format.name]
        return f"{start} | {beside} | {error:.5f} | | {lines_of(format)} |"
    beside, function = OTHERS[format.name]
    theirs = function(x)
    equal = float(((ours - theirs).abs() <= 1e-6 * theirs.abs()).double().mean())
    return f"{start} | {beside} | {_error(theirs, x):.5f} | {equal:.2%} | {lines_of(format)} |"


def _error(found: Tensor, x: Tensor) -> float:
    return float((found.double() - x).norm() / x.double().norm())


def lines_of(format: RowFormat) -> int:
    """Return a format's lines of code: no blank ones, comments, docstrings and imports.

    All that its functions use of their module counts, and a line for each field of its `RowFormat`.
    """
    names = [name for name in ("encode", "decode", "turn") if getattr(format, name) is not None]
    functions = [function_of(format, name) for name in names]
    fields = type(format).__dataclass_fields__.items()
    given = sum(bool(getattr(format, name) != field.default) for name, field in fields)
    module = sys.modules[functions[0].__module__]
    text = inspect.getsource(module)
    known = {name: node for node in ast.parse(text).body for name in _named(node)}
    wanted, seen = [f.__name__ for f in (*functions, format.row_bytes)], dict[str, int]()
    while wanted:
        name = wanted.pop()
        if name in known and name not in seen:
            seen[name] = _code(known[name], text.splitlines())
            wanted += [node.id for node in ast.walk(known[name]) if isinstance(node, ast.Name)]
    return given + sum(seen.values())


def _named(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _code(node: ast.stmt, lines: list[str]) -> int:
    """Return how many of a statement's lines are code."""
    span = range(node.lineno - 1, node.end_lineno or node.lineno)
    first: Any = node.body[0] if isinstance(node, ast.FunctionDef) else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        span = [at for at in span if not first.lineno - 1 <= at < first.end_lineno]  # type: ignore
    return sum(
        bool(text) and not text.startswith("#") for text in (lines[at].strip() for at in span)
    )


def table() -> str:
    """Return the whole table."""
    return "\n".join([HEAD, *(row_of(format) for format in row_formats().values())])


if __name__ == "__main__":
    print(table())
