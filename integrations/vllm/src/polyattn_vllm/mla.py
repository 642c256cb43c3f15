"""MLA for vLLM: polyattn absorbs short rows and expands long ones, over vLLM's own latent cache."""

from __future__ import annotations

from typing import Any, ClassVar

from polyattn import LatentAttention, LatentSpec, LayerGroup, PolyattnError
from polyattn.host import refuse
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from polyattn_vllm.attention import PolyattnBackend
from polyattn_vllm.step import REMEDY, Step, pages_of

UNSERVED = (
    "alibi_slopes",
    "sliding_window",
    "logits_soft_cap",
    "indexer",
    "kv_sharing_target_layer_name",
)


class PolyattnMLABackend(PolyattnBackend):
    """The same for MLA; an fp8 cache is e4m3, as vLLM's MLA layer reads it."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return PolyattnMLAImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)


class PolyattnMLAImpl(MLAAttentionImpl[Step]):
    """One MLA layer of vLLM's. `forward_mha` gets all tokens; the plan says which are absorbed."""

    supports_pcp = supports_dcp = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, *,
        kv_cache_dtype: str, kv_lora_rank: int, qk_rope_head_dim: int, qk_head_dim: int,
        v_head_dim: int, **others: Any,
    ):  # fmt: skip
        refuse(REMEDY, **{name: others.get(name) for name in UNSERVED})
        if kv_cache_dtype not in PolyattnMLABackend.supported_kv_cache_dtypes:
            raise PolyattnError(f"kv_cache_dtype={kv_cache_dtype} isn't served of MLA; {REMEDY}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self.fields = {
            "kind": "mla",
            "num_heads": num_heads,
            "head_size": qk_head_dim,
            "scale": self.scale,
            "v_head_size": v_head_dim,
            "latent": LatentSpec(rank=kv_lora_rank, rope_head_size=qk_rope_head_dim),
        }

    def attach(self, layer: Any, group: LayerGroup) -> LatentAttention:
        """Return polyattn's layer for this one of vLLM's, with the halves of its up-projection."""
        scale = layer._k_scale_float if group.spec.stored_dtype != group.spec.dtype else 1.0
        self.ours = LatentAttention(group, layer.W_UK_T, layer.W_UV, k_scale=scale)
        return self.ours

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor,
        kv_cache_dtype: str, k_scale: Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Store new latents (tokens, rank) and rope keys (tokens, 1, size); a slot of -1 skips."""
        refuse(REMEDY, skip_scale=skip_scale)
        slots = slot_mapping.flatten()
        latent, rope_key = kv_c_normed[: len(slots)], k_pe[: len(slots)].squeeze(1)
        self.ours.store(latent, rope_key, pages_of(self.ours, kv_cache), slots)

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Step, k_scale: Tensor, output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attend for the step's tokens, whose latents the cache holds."""
        refuse(REMEDY, output_scale=output_scale)
        out = output.unflatten(-1, (self.num_heads, -1))
        attn_metadata.attend(self, q, None, kv_c_and_k_pe_cache, out)

    def forward_mqa(self, *args: Any) -> Any:
        raise NotImplementedError("a step counts no decodes: all tokens are forward_mha's")
