"""Attention for vLLM: decoders, encoders and cross-attention, over vLLM's own cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from polyattn import Attention, LayerGroup
from polyattn.host import refuse
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

from polyattn_vllm.layouts import Layouts
from polyattn_vllm.step import REMEDY, Builder, Step, first, pages_of

KINDS: dict[str, dict[str, Any]] = {
    AttentionType.DECODER: {},
    AttentionType.ENCODER: {"role": "encoder", "causal": False},
    AttentionType.ENCODER_ONLY: {"role": "encoder_only", "causal": False},
    AttentionType.ENCODER_DECODER: {"role": "cross", "causal": False},
}


class PolyattnBackend(Layouts, AttentionBackend):
    """Answers vLLM's questions before it builds a layer. Selection checks for kernels at start-up."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return PolyattnImpl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in KINDS

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # selection refuses layers that no backend here serves

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # plans use the host's lengths


class PolyattnImpl(AttentionImpl[Step]):
    """A layer of vLLM's: the `fields` of its `LayerSpec`, and vLLM's calls of it.

    vLLM fuses no quantised output into it (`fused_output_quant_supported`).
    """

    supports_pcp = supports_dcp = False
    ours: Any = None

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None,
        kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):  # fmt: skip
        config = get_current_vllm_config_or_none()  # the drafter's own, of its layers
        refuse(REMEDY, use_non_causal=config is not None and config.attention_config.use_non_causal)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self.uncached = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self.fields = {
            "num_heads": num_heads, "num_kv_heads": self.num_kv_heads, "head_size": head_size,
            "scale": self.scale, "sliding_window": sliding_window, "alibi": alibi_slopes is not None,
            "logit_soft_cap": logits_soft_cap or None, "learned_sinks": sinks is not None,
            "cached": not self.uncached, **KINDS[attn_type],
        }  # fmt: skip

    def attach(self, layer: Any, group: LayerGroup) -> Attention:
        """Return polyattn's layer for this one of vLLM's, whose weights are loaded."""
        scales = {}
        if group.spec.scales == "head":
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        elif group.spec.stored_dtype != group.spec.dtype:
            scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}
        ours = Attention(group, sinks=self.sinks, alibi_slopes=self.alibi_slopes, **scales)
        self.ours = ours
        return ours

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Read the sinks again: a reload writes them through `.data`, which counts no version."""
        if self.sinks is not None and self.ours is not None:
            self.ours.sinks.tensor = self.sinks
            self.ours.sinks.current()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store new keys and values. A slot of -1 skips; tokens beyond the slots are padding."""
        if not self.uncached:
            tokens = slot_mapping.shape[0]
            pages = pages_of(self.ours, kv_cache)
            self.ours.store(first(key, tokens), first(value, tokens), pages, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Step | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend for the step's tokens. Later tokens are padding and stay unchanged."""
        refuse(REMEDY, output_scale=output_scale, output_block_scale=output_block_scale)
        if attn_metadata is None:  # memory is being profiled
            return output.fill_(0)
        own_keys = (key, value) if self.uncached else None
        attn_metadata.attend(self, query, own_keys, kv_cache, output)
        return output
