"""What does a sparse layer choose by, and how does its choice name keys? In tokens and entries."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.errors import SpecError
from polyattn.spec.checks import choice, flag, integer, number

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


ACTIVATIONS = ("relu", "none")
FOLDS = ("weighted", "sum", "none")


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """How an indexer scores a sequence's entries and chooses among them.

    The score of entry e for the token at t is `sum_h w[t, h] * act(scale * q[t, h] . k[e])`. A candidate
    is an entry, or the best of `pool` neighbours; the `budget` best candidates are chosen.

    - `num_heads`, `head_size`: of the index queries; all heads share one index key an entry.
    - `activation`: `"relu"` or `"none"`.
    - `fold`: `"weighted"`, each head times a weight that the call gives, summed; `"sum"`; or `"none"`, a
      choice for each head.
    - `scale`: 0: `head_size ** -0.5`.
    - `tokens_per_entry` m: a token sees entry e where e < (t + 1) // m.
    - `pool` B: candidate c is the best of entries c * B to c * B + B - 1 that the token sees.
    - `forced_first`, `forced_last`: how many of the oldest and newest candidates that a token sees are
      chosen before all others, within the budget.
    - `tail`: the group of tokens that isn't complete yet is chosen beside the budget, as id (t + 1) // m.
    - `budget`: how many candidates; a float up to 1, which part of those that the token sees, rounded up.
    - `within` b: only entries count that lie in the blocks of b entries which the call gives.

    Of candidates with equal scores the smaller id is chosen. Raises `SpecError`.
    """

    num_heads: int
    head_size: int
    budget: int | float
    activation: str = "relu"
    fold: str = "weighted"
    scale: float = 0.0
    tokens_per_entry: int = 1
    pool: int = 1
    forced_first: int = 0
    forced_last: int = 0
    tail: bool = False
    within: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_size", "tokens_per_entry", "pool"):
            integer(f"indexer.{name}", getattr(self, name), 1)
        for name in ("forced_first", "forced_last"):
            integer(f"indexer.{name}", getattr(self, name), 0)
        if isinstance(self.budget, float):
            if not 0.0 < self.budget <= 1.0:
                raise SpecError(
                    f"indexer.budget={self.budget!r} must be a part, up to 1, or a number of candidates"
                )
        else:
            integer("indexer.budget", self.budget, 1)
        choice("indexer.activation", self.activation, ACTIVATIONS)
        choice("indexer.fold", self.fold, FOLDS)
        flag("indexer.tail", self.tail)
        if self.within is not None:
            integer("indexer.within", self.within, 1, hint="; use None for all entries")
        number("indexer.scale", self.scale, "a positive number, or 0 for the default", 0)
        object.__setattr__(self, "scale", float(self.scale) or self.head_size**-0.5)
        if self.tail and (self.pool > 1 or self.tokens_per_entry == 1):
            raise SpecError(
                "indexer.tail=True is for unpooled entries of several tokens; a group of "
                f"tokens_per_entry={self.tokens_per_entry}, pool={self.pool} has no tail"
            )

    @property
    def choices(self) -> int:
        """How many choices a token has: the second size of the tensor."""
        return self.num_heads if self.fold == "none" else 1
