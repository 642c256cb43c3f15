"""SGLang on polyattn.

    python -m sglang.launch_server --model-path … --attention-backend polyattn --disable-cuda-graph

SGLang finds the plugin by its entry point (group `sglang.srt.plugins`) in every process.
"""

from __future__ import annotations

from typing import Any

from polyattn_sglang.attention import LEDGER, ServedAttention

report, reset = LEDGER.report, LEDGER.reset

__all__ = ["create", "register", "report", "reset"]


def register() -> None:
    """Add the name to SGLang's attention backends and to its arguments' choices."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if "polyattn" not in ATTENTION_BACKEND_CHOICES:
        for add in (
            add_attention_backend_choices,
            add_deterministic_attention_backend_choices,
            add_radix_supported_deterministic_attention_backend_choices,
        ):
            add(["polyattn"])
    register_attention_backend("polyattn")(create)


def create(runner: Any) -> Any:
    """Return the backend for one model runner, of SGLang's own base class."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.runtime_context import get_exec

    backend: Any = type("PolyattnAttnBackend", (ServedAttention, AttentionBackend), {})
    return backend(runner, get_exec().deterministic.enable_deterministic_inference)
