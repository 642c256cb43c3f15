"""What can a layer ask for that a backend must claim? The names, and which a spec asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyattn.spec.kinds import Invariance

if TYPE_CHECKING:
    from polyattn.spec.layer import LayerSpec

FEATURES = {
    "causal": "a causal mask, aligned to the bottom right",
    "non_causal": "no causal mask",
    "gqa": "fewer KV heads than query heads",
    "v_head_size": "a V head size that differs from the K head size",
    "sliding_window": "a sliding window",
    "window_right": "another window after the query than before it",
    "chunked": "chunked attention",
    "logit_soft_cap": "logit soft capping",
    "alibi": "ALiBi",
    "learned_sinks": "learned sink logits",
    "sink_tokens": "kept first tokens beyond the window",
    "cache_positions": "keys rotated at their places within the cache",
    "cache_positions_by_length": "of these, frequencies that follow a sequence's length",
    "variant": "a variant's functions of scores",
    "custom_mask": "masks that a step brings",
    "block_sparse": "rows of blocks that a step brings",
    "tensor_scales": "scales read from tensors on the device",
    "head_scales": "a scale for each KV head",
    "fp8_inputs": "queries, keys and values that come in e4m3",
    "fp8_output": "an output in e4m3",
    "lse": "returning the log-sum-exp",
    "length_bounds": "steps planned by upper bounds of the lengths",
    "deterministic": "the same bits from the same inputs",
    "batch_invariant": "the same bits for a request in any batch",
    "step_invariant": "the same bits for a token however its sequence is divided into steps",
    "call_invariant": "the same bits with a cache and without one",
    "gated": "Mamba's gate z",
    "grouped_channels": "Mamba-1's groups of B and C",
    "bc_in_float32": "Mamba's B and C in float32 beside x in 16 bits",
    "narrow_states": "recurrent states kept in 16 bits",
    "wide_conv_states": "a convolution's state with room for drafts",
}
"""Every feature that a `LayerSpec` can ask for and a backend must claim, with what it means."""
RECURRENT = frozenset(
    {"gated", "grouped_channels", "bc_in_float32", "narrow_states", "wide_conv_states"}
)
"""Those that only recurrent layers ask for."""


def features(spec: LayerSpec) -> frozenset[str]:
    """Return the names in `FEATURES` that `spec` asks for."""
    form = spec.recurrent
    rope = spec.rope if spec.rope is not None and spec.rope.positions == "cache" else None
    wanted = {
        "causal": spec.causal,
        "non_causal": not spec.causal,
        "gqa": spec.num_kv_heads != spec.num_heads,
        "v_head_size": spec.v_head_size != spec.head_size,
        "sliding_window": spec.sliding_window is not None,
        "window_right": spec.window_right is not None,
        "chunked": spec.chunk_size is not None,
        "logit_soft_cap": spec.logit_soft_cap is not None,
        "alibi": spec.alibi,
        "learned_sinks": spec.learned_sinks,
        "sink_tokens": spec.sink_tokens > 0,
        "cache_positions": rope is not None,
        "cache_positions_by_length": rope is not None and rope.scaling in ("dynamic", "longrope"),
        "variant": spec.variant is not None,
        "custom_mask": spec.mask == "custom",
        "block_sparse": spec.mask == "block_sparse",
        "tensor_scales": spec.scales == "tensor",
        "head_scales": spec.scales == "head",
        "fp8_inputs": spec.qkv_dtype != "auto",
        "fp8_output": spec.out_dtype != "auto",
        "lse": spec.needs_lse,
        "length_bounds": spec.length_bounds,
        "deterministic": spec.deterministic,
        "batch_invariant": spec.batch_invariant >= Invariance.BATCH,
        "step_invariant": spec.batch_invariant >= Invariance.STEPS,
        "call_invariant": spec.batch_invariant >= Invariance.CALLS,
        "gated": form is not None and form.gated,
        "grouped_channels": form is not None and form.channel_groups > 1,
        "bc_in_float32": form is not None and form.bc_in_float32,
        "narrow_states": form is not None and form.state_dtype != "auto",
        "wide_conv_states": form is not None and form.draft_tokens > 0,
    }
    return frozenset(name for name, asked in wanted.items() if asked)
