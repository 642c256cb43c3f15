"""Which options does a recurrent layer have? Sizes in elements."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.errors import SpecError, choice, flag, integer
from polyattn.spec.fields import Named, short_repr
from polyattn.spec.kinds import FEATURE_MAPS, AttentionKind

DELTA_RULES = frozenset({AttentionKind.GDN, AttentionKind.KDA})
SCALED = DELTA_RULES | {AttentionKind.LINEAR, AttentionKind.RWKV6, AttentionKind.RWKV7}
"""Kinds whose output is multiplied by `LayerSpec.scale`."""
VALUELESS = frozenset(map(AttentionKind, ("short_conv", "mamba1", "mamba2", "rg_lru")))
"""Kinds that have no values, whose heads could have another size."""
STATE_DTYPES = ("auto", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(Named):
    """The recurrent part of a layer; `polyattn.spec.recurrence` says which fields fit which kind.

    Attributes:
        state_size: elements of Mamba's state for each channel.
        conv_width: inputs that the short convolution sees, the newest included. Beside Mamba or a delta
            rule it is another layer's, of kind `"short_conv"`, with a state of its own.
        draft_tokens: D, the most tokens of a step that may be rejected. The convolution's state is then
            a ring of conv_width - 1 + D inputs; position p's is in column p modulo that. The sequence's
            next length says how many were rejected.
        activation: after the short convolution: `"silu"` or None.
        dt_softplus: Mamba's step size is softplus(dt + dt_bias).
        qk_norm: a delta rule's queries and keys are scaled to length 1 first.
        feature_map: of linear attention with a normaliser, applied to queries and keys: `"elu+1"`,
            `"relu"`, or None where the layer's `variant` has another one (`feature_mod`).
        gated: Mamba takes a gate z beside x, and returns y silu(z).
        channel_groups: groups of Mamba-1's channels; each has a B and a C of its own.
        bc_in_float32: Mamba's B and C are float32 whatever the layer's dtype.
        state_dtype: of the state between steps: `"bfloat16"` or `"float16"`; `"auto"`: float32, for a
            convolution the layer's dtype. A step computes in float32 and rounds the new state.

    Raises:
        SpecError: a field has a value that no layer has.

    Examples:
        >>> conv = RecurrentSpec(conv_width=4, activation="silu")
        >>> LayerSpec(kind="short_conv", num_heads=64, head_size=1, recurrent=conv).kind.value
        'short_conv'

    """

    state_size: int = 0
    conv_width: int = 0
    draft_tokens: int = 0
    activation: str | None = None
    dt_softplus: bool = True
    qk_norm: bool = False
    feature_map: str | None = None
    gated: bool = False
    channel_groups: int = 1
    bc_in_float32: bool = False
    state_dtype: str = "auto"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        integer("recurrent.state_size", self.state_size, 0)
        integer("recurrent.conv_width", self.conv_width, 0)
        integer("recurrent.draft_tokens", self.draft_tokens, 0)
        if self.activation is not None:
            choice("recurrent.activation", self.activation, ("silu",))
        if self.feature_map is not None:
            choice("recurrent.feature_map", self.feature_map, FEATURE_MAPS)
        integer("recurrent.channel_groups", self.channel_groups, 1)
        choice("recurrent.state_dtype", self.state_dtype, STATE_DTYPES)
        for name in ("dt_softplus", "qk_norm", "gated", "bc_in_float32"):
            flag(f"recurrent.{name}", getattr(self, name))

    @property
    def features(self) -> frozenset[str]:
        """The names in `spec.features.RECURRENT` that the layer needs."""
        asks = {
            "gated": self.gated,
            "grouped_channels": self.channel_groups > 1,
            "bc_in_float32": self.bc_in_float32,
            "narrow_states": self.state_dtype != "auto",
            "wide_conv_states": self.draft_tokens > 0,
        }
        return frozenset(name for name, asked in asks.items() if asked)

    def check_within(
        self,
        kind: AttentionKind,
        num_heads: int,
        dtype: str,
        variant: str | None = None,
        scale: float | None = None,
    ) -> None:
        """Check the options that only some kinds have.

        Args:
            kind: the layer's.
            num_heads: the layer's; of Mamba-1 its channels.
            dtype: the layer's.
            variant: the layer's.
            scale: the layer's, None for the default.

        Raises:
            SpecError: an option isn't one of this kind.

        """
        mamba1 = kind is AttentionKind.MAMBA1
        mamba = mamba1 or kind is AttentionKind.MAMBA2
        if mamba and not self.state_size:
            raise SpecError(f"recurrent.state_size=0: a {kind.value} layer needs a positive number")
        if kind is AttentionKind.SHORT_CONV and not self.conv_width:
            raise SpecError("recurrent.conv_width=0: a short_conv layer needs a positive number")
        if not self.dt_softplus and not mamba:
            raise SpecError(
                f"recurrent.dt_softplus=False: {kind.value} has no step size; leave it out"
            )
        if scale is not None and kind not in SCALED:
            raise SpecError(
                f"scale={scale}: a {kind.value} layer multiplies nothing by it; leave it out"
            )
        if self.qk_norm and kind not in DELTA_RULES:
            raise SpecError(
                f"recurrent.qk_norm=True: {kind.value} has none; only delta rules have one, kinds 'gdn' "
                "and 'kda'"
            )
        for name in ("gated", "bc_in_float32"):
            if getattr(self, name) and not mamba:
                raise SpecError(
                    f"recurrent.{name}=True: {kind.value} has none; only Mamba layers have one"
                )
        if self.draft_tokens and kind is not AttentionKind.SHORT_CONV:
            raise SpecError(
                f"recurrent.draft_tokens={self.draft_tokens}: only a short convolution's state has room "
                f"for drafts; {kind.value} keeps the state after each of them by Batch.state_targets"
            )
        if self.channel_groups > 1 and (not mamba1 or num_heads % self.channel_groups):
            raise SpecError(
                f"recurrent.channel_groups={self.channel_groups}: it is Mamba-1's, and divides its "
                f"channels, num_heads={num_heads}; other kinds' groups are num_kv_heads"
            )
        if self.state_dtype != "auto" and (kind is AttentionKind.SHORT_CONV or dtype == "float64"):
            raise SpecError(
                f"recurrent.state_dtype={self.state_dtype!r}: a {kind.value} state of a {dtype} layer is "
                "in the layer's dtype; leave it out"
            )
        phi = kind is AttentionKind.PHI_LINEAR
        own = phi and variant is not None
        if (self.feature_map is not None) + own != phi:
            beside = f" beside variant={variant!r}" if own else ""
            raise SpecError(
                f"kind={kind.value!r} and recurrent.feature_map={self.feature_map!r}{beside} don't go "
                f"together: kind='phi_linear' takes one of {', '.join(FEATURE_MAPS)}, or a variant with "
                "a feature_mod; no other kind takes any"
            )
