"""Random small functions of the operations that generators know, and one backend beside the reference.

As a program: python random_functions.py BACKEND COUNT, in Triton's interpreter for TRITON_ATTN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    LayerGroup,
    LayerSpec,
    register_variant,
    select,
    unregister_variant,
)
from polyattn.families.attention import reference
from polyattn.workload.compare import output_error
from polyattn.workload.pages import fill
from torch import Tensor

Expression = tuple[Any, ...]
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", block_size=16)
DOCUMENTS = 40
UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "abs": torch.abs, "sin": torch.sin,
    "cos": torch.cos, "square": lambda x: torch.tanh(x) ** 2, "relu": torch.relu,
    "exp": lambda x: torch.exp(-torch.abs(x)), "log": lambda x: torch.log(1.0 + torch.abs(x)),
    "sqrt": lambda x: torch.sqrt(1.0 + torch.abs(x)), "neg": lambda x: -x,
    "rsqrt": lambda x: torch.rsqrt(1.0 + x * x), "exp2": lambda x: torch.exp2(-torch.abs(x)),
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "minimum": torch.minimum,
    "maximum": torch.maximum, "mul": lambda a, b: a * torch.tanh(b),
    "div": lambda a, b: a / (1.0 + torch.abs(b)),
}  # fmt: skip
INTEGER: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "minimum": torch.minimum,
    "maximum": torch.maximum, "mod": lambda a, n: a % n, "floordiv": lambda a, n: a // n,
}  # fmt: skip
COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip


def floats(depth: int) -> st.SearchStrategy[Expression]:
    leaves = st.sampled_from([("score",), ("temperature",), ("number", 0.5), ("number", -2.0)])
    if not depth:
        return leaves
    less = st.deferred(lambda: floats(depth - 1))
    return st.one_of(
        leaves,
        st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), less),
        st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), less, less),
        st.tuples(st.just("where"), st.deferred(lambda: truths(depth - 1)), less, less),
        st.tuples(st.just("of_integer"), st.deferred(lambda: integers(depth - 1))),
        st.tuples(st.just("table"), st.deferred(lambda: integers(depth - 1))),
    )


def integers(depth: int) -> st.SearchStrategy[Expression]:
    leaves = st.sampled_from(
        [("b",), ("h",), ("q",), ("k",), ("document", "q"), ("document", "k"), ("whole", 3)]
    )
    if not depth:
        return leaves
    less = st.deferred(lambda: integers(depth - 1))
    divisor = st.sampled_from([("whole", 2), ("whole", 5), ("whole", -3)])
    return st.one_of(
        leaves,
        st.tuples(st.just("integer"), st.sampled_from(["add", "sub", "minimum", "maximum"]), less, less),
        st.tuples(st.just("integer"), st.sampled_from(["mod", "floordiv"]), less, divisor),
        st.tuples(st.just("clamp"), less),
    )  # fmt: skip


def truths(depth: int) -> st.SearchStrategy[Expression]:
    less = st.deferred(lambda: integers(max(0, depth - 1)))
    compared = st.tuples(st.just("compared"), st.sampled_from(sorted(COMPARED)), less, less)
    if not depth:
        return compared
    deeper = st.deferred(lambda: truths(depth - 1))
    return st.one_of(
        compared,
        st.tuples(st.just("logic"), st.sampled_from(sorted(LOGIC)), deeper, deeper),
        st.tuples(st.just("not"), deeper),
    )


def value(expression: Expression, at: dict[str, Any]) -> Any:
    """What an expression is at these places: tensors, or what torch.fx traces."""
    head, *rest = expression
    if head in ("number", "whole"):
        # As a tensor's operand everywhere: torch.minimum takes no plain number.
        zero = at["k"] * 0
        return zero + rest[0] if head == "whole" else at["score"] * 0.0 + rest[0]
    if head == "temperature":
        return at["temperature"][at["h"]] + at["score"] * 0.0
    if head == "document":
        return at["document"][at["b"], at[rest[0]]]
    if head == "table":
        size = at["table"].shape[0]
        return at["table"][torch.clamp(value(rest[0], at), 0, size - 1)] + at["score"] * 0.0
    if head in at:
        return at[head]
    if head == "of_integer":
        return value(rest[0], at).to(torch.float32) * 0.125 + at["score"] * 0.0
    if head == "clamp":
        return torch.clamp(value(rest[0], at), min=-4, max=7)
    if head == "not":
        return ~value(rest[0], at)
    if head == "where":
        return torch.where(*(value(part, at) for part in rest))
    name, *operands = rest
    tables: dict[str, dict[str, Callable[..., Any]]] = {
        "unary": UNARY, "binary": BINARY, "integer": INTEGER, "compared": COMPARED, "logic": LOGIC,
    }  # fmt: skip
    return tables[head][name](*(value(part, at) for part in operands))


def variant_of(score: Expression, seen: Expression) -> AttentionVariant:
    def score_mod(s, b, h, q, k, *, temperature, document, table):  # type: ignore[no-untyped-def]
        at = {"score": s, "b": b, "h": h, "q": q, "k": k, "temperature": temperature,
              "document": document, "table": table}  # fmt: skip
        return s + 2.0 * torch.tanh(value(score, at))

    def mask_mod(b, h, q, k, *, document):  # type: ignore[no-untyped-def]
        return value(seen, {"b": b, "h": h, "q": q, "k": k, "document": document}) | (q == k)

    return AttentionVariant(
        name="drawn", score_mod=score_mod, mask_mod=mask_mod,
        inputs={"temperature": "float32[num_heads]", "document": "int32[num_seqs, *]",
                "table": "float32[*]"},
    )  # fmt: skip


def difference(backend: str, score: Expression, seen: Expression) -> float:
    """Return how far a backend is from the reference with these functions."""
    generator = torch.Generator().manual_seed(7)
    register_variant(variant_of(score, seen))
    try:
        group = LayerGroup(select(SPEC.replace(variant="drawn"), backend=backend, verify=False))
        inputs = {"temperature": torch.rand(4, generator=generator), "table": torch.randn(6)}
        layer, cache = Attention(group, inputs=inputs), group.allocate_cache(6)
        fill(cache, generator)
        document = torch.randint(0, 3, (3, DOCUMENTS), generator=generator).int()
        table = torch.tensor([[3, 0], [5, 1], [2, 4]], dtype=torch.int32)
        batch = Batch.from_lens(
            [6, 1, 3], [21, 17, 3], table, 16, inputs={"document": document}
        )  # fmt: skip
        new = [torch.randn(10, heads, 32, generator=generator) for heads in (4, 2, 2)]
        with torch.no_grad():
            out = layer(*new, cache, batch)
        assert isinstance(out, Tensor)
        expected, _ = reference.forward(
            group.spec, new[0], None, None, cache, batch, layer.params
        )  # fmt: skip
        return output_error(out, expected)
    finally:
        unregister_variant("drawn")


def check(backend: str, count: int) -> None:
    """Draw `count` pairs of functions; whichever is wrong is made as small as it can be."""

    @settings(max_examples=count, deadline=None, derandomize=True, database=None)
    @given(floats(3), truths(2))
    def right(score: Expression, seen: Expression) -> None:
        found = difference(backend, score, seen)
        assert found < 5e-5, f"{backend} is off by {found:.3g}: {score}, {seen}"

    right()


if __name__ == "__main__":
    check(sys.argv[1], int(sys.argv[2]))
