"""Which parts does the latent of an MLA layer have? In elements."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.errors import integer
from polyattn.spec.fields import Named


@dataclass(frozen=True, kw_only=True)
class LatentSpec(Named):
    """The latent part of an MLA layer. Sizes are in elements.

    Attributes:
        rank: of the latent, which is the value and the first part of the key.
        rope_head_size: of the rope key, which all heads share.

    Raises:
        SpecError: a size isn't one.

    Examples:
        >>> LatentSpec(rank=512, rope_head_size=64).size
        576

    """

    rank: int
    rope_head_size: int

    def __post_init__(self) -> None:
        integer("latent.rank", self.rank, 1)
        integer("latent.rope_head_size", self.rope_head_size, 0)

    @property
    def size(self) -> int:
        """Elements that the cache holds for each token: the latent and the rope key."""
        return self.rank + self.rope_head_size
