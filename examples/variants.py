"""Seven attention variants, each in at most 15 lines and without a kernel, over pages, on any backend.

    python examples/variants.py [BACKEND]

Each example takes a layer's spec and returns what it becomes, what the layer is given by name, and what a
step of `LENS` brings: here two prompts, one of them continued, and a decode.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from polyattn import (
    Attention,
    AttentionVariant,
    Batch,
    CustomMask,
    LayerGroup,
    LayerSpec,
    register_variant,
    select,
    t5_buckets,
    variants,
)

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", block_size=16)
LENS = ([5, 1, 20], [21, 33, 20])
"""New tokens, and all tokens, of each sequence."""
Example = tuple[LayerSpec, dict[str, Any], dict[str, Any]]


def flash_sigmoid(spec: LayerSpec) -> Example:
    def sigmoid(score, b, h, q_idx, kv_idx, *, bias):  # type: ignore[no-untyped-def]
        return torch.sigmoid(score + bias)

    inputs = {"bias": "float32"}
    register(AttentionVariant(name="ex_sigmoid", score_mod=sigmoid, softmax=False, inputs=inputs))
    return spec.replace(variant="ex_sigmoid"), {"bias": -3.0}, {}


def soft_cap(spec: LayerSpec) -> Example:
    def capped(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return 2.0 * torch.tanh(score / 2.0)

    register(AttentionVariant(name="ex_soft_cap", score_mod=capped))
    return spec.replace(variant="ex_soft_cap"), {}, {}


def alibi(spec: LayerSpec) -> Example:
    def sloped(score, b, h, q_idx, kv_idx, *, slopes):  # type: ignore[no-untyped-def]
        return score + slopes[h] * (kv_idx - q_idx)

    inputs = {"slopes": "float32[num_heads]"}
    register(AttentionVariant(name="ex_alibi", score_mod=sloped, inputs=inputs))
    slopes = 2.0 ** -torch.arange(1.0, spec.num_heads + 1)
    return spec.replace(variant="ex_alibi"), {"slopes": slopes}, {}


def speculation_tree(spec: LayerSpec) -> Example:
    parents = [[-1, 0, 0, 1, 2], [-1], [i // 2 - 1 if i > 1 else i - 1 for i in range(20)]]
    return spec.replace(mask="custom"), {}, {"mask": CustomMask.tree(parents)}


def documents(spec: LayerSpec) -> Example:
    def same(b, h, q_idx, kv_idx, *, document):  # type: ignore[no-untyped-def]
        return document[b, q_idx] == document[b, kv_idx]

    inputs = {"document": "int32[num_seqs, *]"}
    register(AttentionVariant(name="ex_documents", mask_mod=same, inputs=inputs))
    packed = torch.arange(max(LENS[1])).div(8, rounding_mode="floor").int()
    step = {"inputs": {"document": packed.expand(len(LENS[1]), -1).contiguous()}}
    return spec.replace(variant="ex_documents"), {}, step


def t5_bias(spec: LayerSpec) -> Example:
    bias = torch.linspace(-2, 2, 32 * spec.num_heads).view(32, spec.num_heads)  # the checkpoint's
    buckets = t5_buckets(32, 128, bidirectional=False)
    given = {"bias": bias, "bucket_of_distance": buckets}
    return spec.replace(variant="relative_bias", scale=1.0), given, {}


def head_temperature(spec: LayerSpec) -> Example:
    def tempered(score, b, h, q_idx, kv_idx, *, temperature):  # type: ignore[no-untyped-def]
        return score / temperature[h]

    inputs = {"temperature": "float32[num_heads]"}
    register(AttentionVariant(name="ex_temperature", score_mod=tempered, inputs=inputs))
    temperature = torch.linspace(0.5, 2.0, spec.num_heads)
    return spec.replace(variant="ex_temperature"), {"temperature": temperature}, {}


EXAMPLES = (flash_sigmoid, soft_cap, alibi, speculation_tree, documents, t5_bias, head_temperature)


def register(variant: AttentionVariant) -> None:
    """Make a variant known, once."""
    if variant.name not in variants():
        register_variant(variant)


def attend(
    example: Example, backend: str | None, new: list[torch.Tensor], cached: list[torch.Tensor],
    table: torch.Tensor, lens: tuple[list[int], list[int]] = LENS,
) -> torch.Tensor:  # fmt: skip
    """Run a step. `new`: its queries, keys and values; `cached`: keys and values by block."""
    spec, given, step = example
    device = new[0].device
    group = LayerGroup(select(spec, device.type, backend=backend))
    layer = Attention(group, inputs={n: torch.as_tensor(t).to(device) for n, t in given.items()})
    cache = group.allocate_cache(len(cached[0]))
    cache.key.copy_(cached[0]), cache.value.copy_(cached[1])
    batch = Batch.from_lens(*lens, table, cache.block_size, **step)
    with torch.no_grad():
        out = layer(*new, cache, batch)
    assert isinstance(out, torch.Tensor)
    return out


def main(backend: str | None = None) -> None:
    """Run all of them with random numbers."""
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    new = [torch.randn(sum(LENS[0]), n, SPEC.head_size) for n in heads]
    cached = [torch.randn(9, 16, SPEC.num_kv_heads, SPEC.head_size) for _ in range(2)]
    table = torch.randperm(9).int().view(3, 3)
    for example in EXAMPLES:
        out = attend(example(SPEC), backend, new, cached, table)
        print(f"{example.__name__}: {tuple(out.shape)}, of norm {out.norm():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
