"""What does each recurrent kind take? Its tensors, its parameters and its state, as data.

The letters of a shape: T tokens, H heads (or channels), G groups of B and C, or key heads, K key
head size, V value head size, U one more, N state size, W convolution width, L inputs that a
convolution's state holds (W - 1, and draft_tokens more), R Mamba-1's groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polyattn.spec.kinds import AttentionKind
from polyattn.spec.layer import LayerSpec

GATES = frozenset({"dt", "g", "beta", "w"})
"""Inputs that may be float32 whatever the layer's dtype: models compute them so."""


@dataclass(frozen=True)
class Form:
    """One recurrence. h is the state of a sequence, and `recurrence` says what a token does to it."""

    recurrence: str
    inputs: Mapping[str, str]
    output: str
    state: str
    params: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    state_in_float32: bool = True


FORMS: dict[AttentionKind, Form] = {
    AttentionKind.SHORT_CONV: Form(
        recurrence="y[t] = act(bias + sum_w weight[w] x[t - W + 1 + w]); h holds the last W - 1 x; "
        "with draft_tokens, position p's x in column p modulo L",
        inputs={"x": "TH"},
        output="TH",
        state="HL",
        params={"weight": "HW", "bias": "H"},
        optional=frozenset({"bias"}),
        state_in_float32=False,
    ),
    AttentionKind.MAMBA1: Form(
        recurrence="h = exp(dt A) h + dt B x; y = C h + D x   (Gu and Dao, 2023)",
        inputs={"x": "TH", "dt": "TH", "B": "TN", "C": "TN"},
        output="TH",
        state="HN",
        params={"A": "HN", "D": "H", "dt_bias": "H"},
        optional=frozenset({"D", "dt_bias"}),
    ),
    AttentionKind.MAMBA2: Form(
        recurrence="h = exp(dt A) h + dt x B'; y = h C + D x   (Dao and Gu, 2024)",
        inputs={"x": "THK", "dt": "TH", "B": "TGN", "C": "TGN"},
        output="THK",
        state="HKN",
        params={"A": "H", "D": "H", "dt_bias": "H"},
        optional=frozenset({"D", "dt_bias"}),
    ),
    AttentionKind.LINEAR: Form(
        recurrence="h = exp(decay) h + k v'; o = scale q h   (lightning attention, Qin et al., 2024)",
        inputs={"q": "TGK", "k": "TGK", "v": "THV"},
        output="THV",
        state="HKV",
        params={"decay": "H"},
    ),
    AttentionKind.GDN: Form(
        recurrence="h = exp(g) h; h = h + k (beta (v - h' k))'; o = scale h' q   (Yang et al., 2024)",
        inputs={"q": "TGK", "k": "TGK", "v": "THV", "g": "TH", "beta": "TH"},
        output="THV",
        state="HKV",
    ),
    AttentionKind.KDA: Form(
        recurrence="h = diag(exp(g)) h; h = h + k (beta (v - h' k))'; o = scale h' q   "
        "(Kimi delta attention, Kimi Team, 2025)",
        inputs={"q": "TGK", "k": "TGK", "v": "THV", "g": "THK", "beta": "TH"},
        output="THV",
        state="HKV",
    ),
    AttentionKind.RWKV6: Form(
        recurrence="o = scale (h + diag(u) k v')' r; h = diag(exp(w)) h + k v'   (Peng et al., 2024); "
        "RWKV-5 has one w for all tokens",
        inputs={"r": "THK", "w": "THK", "k": "THK", "v": "THV"},
        output="THV",
        state="HKV",
        params={"u": "HK"},
    ),
    AttentionKind.RWKV7: Form(
        recurrence="h = diag(exp(w)) h + b (h' a)' + k v'; o = scale h' r   (Peng et al., 2025)",
        inputs={"r": "THK", "w": "THK", "k": "THK", "v": "THV", "a": "THK", "b": "THK"},
        output="THV",
        state="HKV",
    ),
    AttentionKind.RG_LRU: Form(
        recurrence="a = exp(-8 softplus(Lambda) sigmoid(recurrent_gate)); "
        "h = a h + sqrt(1 - a a) sigmoid(input_gate) x, a sequence's first token without the root; "
        "y = h   (Griffin, De et al., 2024, and its published code)",
        inputs={"x": "TH", "input_gate": "TH", "recurrent_gate": "TH"},
        output="TH",
        state="H",
        params={"Lambda": "H"},
    ),
    AttentionKind.PHI_LINEAR: Form(
        recurrence="h = h + phi(k) [v, 1]'; o = (h' phi(q))[: V] / ((h' phi(q))[V] + 1e-6)   "
        "(Katharopoulos et al., 2020); any scale cancels",
        inputs={"q": "TGK", "k": "TGK", "v": "THV"},
        output="THV",
        state="HKU",
    ),
}


def form_of(spec: LayerSpec) -> Form:
    """Return the form of a recurrent layer: its kind's, with the additions of its options.

    A gate is one more input, z, of x's shape. Groups of Mamba-1's channels are an axis of B and C.
    """
    form, options = FORMS[spec.kind], spec.recurrent
    assert options is not None
    inputs = dict(form.inputs)
    if options.channel_groups > 1:
        inputs |= dict.fromkeys("BC", "TRN")
    if options.gated:
        inputs["z"] = inputs["x"]
    return replace(form, inputs=inputs) if inputs != form.inputs else form


def shape_of(spec: LayerSpec, shape: str, tokens: int = 0) -> tuple[int, ...]:
    """Return the sizes that a shape's letters stand for."""
    recurrent = spec.recurrent
    assert recurrent is not None
    sizes = {
        "T": tokens,
        "H": spec.num_heads,
        "G": spec.num_kv_heads,
        "K": spec.head_size,
        "V": spec.v_head_size,
        "U": spec.v_head_size + 1,
        "N": recurrent.state_size,
        "W": recurrent.conv_width,
        "L": recurrent.conv_width - 1 + recurrent.draft_tokens,
        "R": recurrent.channel_groups,
    }
    return tuple(sizes[letter] for letter in shape)
