"""Sparse layers: their indexers beside a read of the index, and attention to chosen keys."""

from __future__ import annotations

from polyattn import IndexerSpec, LayerSpec, SparseSpec
from polyattn.conformance.cases.index import layer_for
from table import Bar, Contender, K, Row, model

CHAT, LONG = [(1, 128 * K)] * 64, 1 << 20
DSA = IndexerSpec(num_heads=64, head_size=128, budget=2048)
MSA = IndexerSpec(
    num_heads=4,
    head_size=128,
    budget=16,
    activation="none",
    fold="none",
    scale=1.0,
    pool=128,
    forced_last=1,
)
QSA = IndexerSpec(num_heads=4, head_size=128, budget=512, fold="sum", tokens_per_entry=4, tail=True)
V4 = IndexerSpec(
    num_heads=64, head_size=128, budget=512, tokens_per_entry=4, cache_dtype="fp8_scaled"
)
SCALED = IndexerSpec(num_heads=64, head_size=128, budget=2048, cache_dtype="fp8_scaled")
INDEX: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_INDEX", "TORCH_INDEX"),
    "cpu": ("NATIVE_INDEX", "TORCH_INDEX"),
}
MINIMAX = LayerSpec(
    kind="sparse",
    num_heads=64,
    num_kv_heads=4,
    head_size=128,
    block_size=128,
    sparse=SparseSpec(budget=16, granularity=128, scope="kv_head"),
)
QWEN = LayerSpec(
    kind="sparse",
    num_heads=24,
    num_kv_heads=2,
    head_size=256,
    sparse=SparseSpec(budget=513, granularity=4),
)
LATENT = model("deepseek-v3.2").replace(indexer=None)
V4_ROWS = LayerSpec(
    kind="sparse",
    num_heads=64,
    num_kv_heads=1,
    head_size=512,
    sparse=SparseSpec(budget=512, tokens_per_entry=4, value_in_key=True),
)
V32_ROWS = V4_ROWS.replace(
    num_heads=128, head_size=576, v_head_size=512, sparse=SparseSpec(budget=2048, value_in_key=True)
)
"""`LATENT`'s decode as backends of plain rows take it: absorbed queries, latents of bfloat16."""
PAGED: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_ATTN",),
    "cpu": ("NATIVE_ATTN", "TORCH_SDPA"),
}
CHOSEN: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_MLA_SPARSE", "FLASHMLA_SPARSE"),
    "cpu": ("TORCH_MLA_SPARSE",),
}
BYTES: dict[str, tuple[Contender, ...]] = {
    "cuda": ("FLASHMLA_SPARSE", "TORCH_MLA_SPARSE"),
    "cpu": ("TORCH_MLA_SPARSE",),
}
ROWS_OF: dict[str, tuple[Contender, ...]] = {
    "cuda": ("TRITON_MLA_SPARSE",),
    "cpu": ("NATIVE_ATTN", "TORCH_MLA_SPARSE"),
}
READ, LEVEL = Bar(1.25, "machine.read"), Bar(1.25, "FLASHMLA_SPARSE")

ROWS = [
    *(Row(f"index: {name}, decode 64 x 128k", layer_for(spec, "bfloat16"), CHAT, INDEX, READ,
          ["machine.read"], part="index")
      for name, spec in (("DSA", DSA), ("DSA scaled", SCALED), ("V4", V4), ("MSA", MSA), ("QSA", QSA))),
    Row("index: DSA scaled, e4m3 queries, decode 64 x 128k", layer_for(SCALED, "bfloat16"), CHAT, INDEX,
        READ, ["machine.read"], part="index of e4m3"),
    Row("index: DSA scaled, prompt 4k of 16k", layer_for(SCALED, "bfloat16"), [(4 * K, 16 * K)], INDEX,
        Bar(2.0, "machine.e4m3_products"), ["machine.e4m3_products"], part="index"),
    Row("index: DSA scaled, e4m3 queries, prompt 4k of 16k", layer_for(SCALED, "bfloat16"),
        [(4 * K, 16 * K)], INDEX, Bar(2.0, "machine.e4m3_products"), ["machine.e4m3_products"],
        part="index of e4m3"),
    Row("MSA: decode 64 x 128k", MINIMAX, CHAT, PAGED, Bar(1.2, "machine.read"), ["machine.read"]),
    *(Row(f"MSA: decode 8 x {n // K}k", MINIMAX, [(1, n)] * 8, PAGED) for n in (32 * K, LONG)),
    Row("QSA: decode 64 x 128k", QWEN, CHAT, PAGED, None, ["machine.read"]),
    Row("V4: entries of 512, decode 64 x 128k", V4_ROWS, CHAT, ROWS_OF, None, ["machine.read"]),
    Row("MLA: decode 64 x 32k", LATENT, [(1, 32 * K)] * 64, CHOSEN, LEVEL, ["machine.read"]),
    Row("MLA, rows of 656 bytes: decode 64 x 32k", LATENT.replace(kv_cache_dtype="fp8_ds_mla"),
        [(1, 32 * K)] * 64, BYTES, None, ["machine.read"]),
    Row("MLA: prompt 4k of 16k", LATENT, [(4 * K, 16 * K)], CHOSEN, LEVEL),
]  # fmt: skip
