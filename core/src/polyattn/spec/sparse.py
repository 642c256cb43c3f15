"""How does a sparse layer's choice name keys? `SparseSpec`, in tokens and entries."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.errors import SpecError
from polyattn.spec.checks import choice, flag, integer

SCOPES = ("all", "kv_head", "head")
"""For whom one choice counts: all heads, a KV head's query heads, or one query head."""


@dataclass(frozen=True, kw_only=True)
class SparseSpec:
    """What the ids of a sparse layer's `choice` mean: int32 (num_tokens, scope, K), -1 for none.

    - `budget`: the most ids of a token, K.
    - `granularity` g: id i names the g consecutive entries from i * g on. A causal layer hides those
      that the token doesn't see, so the last group may be incomplete.
    - `scope`: `"all"`, one choice for all heads; `"kv_head"` or `"head"`, one for each.
    - `physical`: ids are places in the cache, block * block_size + offset, instead of places in the
      token's sequence. Whoever gives them answers for what the token sees; granularity 1.
    - `tokens_per_entry` m: an entry of the cache stands for m tokens. A token at position t sees
      entry e where e < (t + 1) // m.
    - `value_in_key`: the cache holds no values; a value is the first `v_head_size` elements of its key.

    Raises `SpecError`.
    """

    budget: int
    granularity: int = 1
    scope: str = "all"
    physical: bool = False
    tokens_per_entry: int = 1
    value_in_key: bool = False

    def __post_init__(self) -> None:
        for name in ("budget", "granularity", "tokens_per_entry"):
            integer(f"sparse.{name}", getattr(self, name), 1)
        choice("sparse.scope", self.scope, SCOPES)
        for name in ("physical", "value_in_key"):
            flag(f"sparse.{name}", getattr(self, name))
        if self.physical and self.granularity > 1:
            raise SpecError(
                f"sparse.granularity={self.granularity}: physical ids name single places of the cache; "
                "use 1, or ids within the sequence"
            )

    def choices(self, num_heads: int, num_kv_heads: int) -> int:
        """Return how many choices a token has: the second size of the tensor."""
        return {"all": 1, "kv_head": num_kv_heads, "head": num_heads}[self.scope]

    def __str__(self) -> str:
        """What is unusual about the choice, for `str(LayerSpec)`."""
        words = f"{self.budget} of {self.granularity}" if self.granularity > 1 else f"{self.budget}"
        whom = {"all": "", "kv_head": " by KV head", "head": " by head"}[self.scope]
        entries = f", entries of {self.tokens_per_entry}" if self.tokens_per_entry > 1 else ""
        return f"choice {words}{whom}{', physical' * self.physical}{entries}"
