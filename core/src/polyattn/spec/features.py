"""Which features can a layer need that a backend must claim? `features(spec)` returns them."""

from __future__ import annotations

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
    "variant": "a variant's functions of scores, or its map of linear attention's features",
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
    "machine_invariant": "the bits that are specified, so the same in any step and on any machine",
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
