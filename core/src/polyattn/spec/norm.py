"""How are queries and keys normed before they are rotated? `NormSpec` has all except the weights."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.errors import SpecError, choice, number
from polyattn.spec.fields import Named
from polyattn.spec.kinds import AttentionKind, Role

OVER = ("head", "token")


@dataclass(frozen=True, kw_only=True)
class NormSpec(Named):
    """An RMS norm (Zhang and Sennrich, 2019) of queries and keys: frozen, hashable, no tensors.

    A row x becomes x / sqrt(mean(x ** 2) + eps) * (weight + offset). It follows the bias and precedes
    the rotation.

    Attributes:
        over: what a row is: each `"head"` (Qwen3, Gemma 3), or all heads of a `"token"` (OLMo 2).
        eps: added to the mean.
        offset: added to the weight; 1 where checkpoints hold what exceeds one (Gemma).

    Raises:
        SpecError: a value describes no norm.

    Examples:
        >>> norm = NormSpec(eps=1e-6)
        >>> LayerSpec(num_heads=32, head_size=128, qk_norm=norm).qk_norm.over
        'head'

    """

    over: str = "head"
    eps: float = 1e-6
    offset: float = 0.0

    def __post_init__(self) -> None:
        choice("qk_norm.over", self.over, OVER)
        number("qk_norm.eps", self.eps, "0 or more", 0)
        number("qk_norm.offset", self.offset, "a finite number")

    def check(self, kind: AttentionKind, role: Role) -> None:
        """Check that a layer can norm.

        Args:
            kind: the layer's.
            role: the layer's.

        Raises:
            SpecError: it has no keys of its own in rows of heads.

        """
        if kind.family != "attention" or role is Role.CROSS:
            what = "cross-attention" if role is Role.CROSS else kind.value
            raise SpecError(
                f"qk_norm={self!r} is for attention over its own keys and values; leave it out for "
                f"{what}, and norm before the call"
            )
