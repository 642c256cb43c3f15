"""Which attention variants does core bring? Their functions are in modules that import torch."""

from __future__ import annotations

from polyattn.spec.variant import AttentionVariant

_HOME = "polyattn.runtime.functions.variants"

SHIPPED = (
    AttentionVariant(
        name="flash_sigmoid",
        score_mod=f"{_HOME}:sigmoid",
        softmax=False,
        inputs={"sigmoid_bias": "float32"},
        summary="a sigmoid of each score instead of a softmax (Ramapuram et al., 2024)",
    ),
    AttentionVariant(
        name="relative_bias",
        score_mod=f"{_HOME}:relative_bias",
        inputs={"bias": "float32[*, num_heads]", "bucket_of_distance": "int32[*]"},
        summary="a learned bias for each bucket of distances and head (T5, MPNet, DeBERTa-style)",
    ),
    AttentionVariant(
        name="vision_local",
        mask_mod=f"{_HOME}:vision_local",
        inputs={"grid_width": "int32", "radius": "int32"},
        summary="patches of a grid see those within a radius of rows and columns",
    ),
)
