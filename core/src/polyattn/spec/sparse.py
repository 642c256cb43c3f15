"""What does a sparse layer choose by, and how does a choice name keys? In tokens and entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import SpecError, choice, flag, integer, number
from polyattn.spec.fields import Named, from_fields, short_repr
from polyattn.spec.kinds import ITEM_BYTES

REDUCTIONS = ("softmax", "mean")


@dataclass(frozen=True, kw_only=True)
class CompressorSpec(Named):
    """How the tokens of a group become one entry of a cache (DeepSeek-V4, 2026).

    Attributes:
        size: elements of an entry.
        tokens_per_entry: m: entry e is of tokens e * m to e * m + m - 1.
        reduction: of a group's rows, element by element: `"softmax"`, weighted by a softmax of the rows'
            gates; or `"mean"`.
        overlap: an entry pools the group before its own as well. A token's row then has twice the size:
            first its part of the next entry, then that of its own.
        drafts: tokens of a step that may be rejected; the states keep that many rows more.

    Raises:
        SpecError: a value or a combination describes no compressor.

    Examples:
        >>> CompressorSpec(size=512, tokens_per_entry=4, overlap=True).capacity
        8

    """

    size: int
    tokens_per_entry: int
    reduction: str = "softmax"
    overlap: bool = False
    drafts: int = 0

    __repr__ = short_repr

    def __post_init__(self) -> None:
        integer("compressor.size", self.size, 1)
        integer("compressor.tokens_per_entry", self.tokens_per_entry, 1)
        integer("compressor.drafts", self.drafts, 0)
        choice("compressor.reduction", self.reduction, REDUCTIONS)
        flag("compressor.overlap", self.overlap)
        if self.overlap and self.reduction == "mean":
            raise SpecError(
                "compressor.overlap=True: the group before the first has no rows, which only a softmax "
                "leaves out; use reduction='softmax'"
            )

    @property
    def groups(self) -> int:
        """The number of token groups that an entry pools."""
        return 2 if self.overlap else 1

    @property
    def channels(self) -> int:
        """Elements of a token's row, and of its gates."""
        return self.size * self.groups

    @property
    def capacity(self) -> int:
        """Rows that a sequence's state holds."""
        return self.tokens_per_entry * self.groups + self.drafts

    def __str__(self) -> str:
        """A short description of the pooling, for `explain`."""
        words = f"{self.reduction} of {self.tokens_per_entry * self.groups} tokens"
        return f"{words}{', overlapping' * self.overlap}"


def _check_compressor(of: Any, name: str, size: int | None = None) -> None:
    """Check that a part's compressor makes its entries; its fields may stand for it."""
    compressor = of.compressor
    if isinstance(compressor, Mapping):
        compressor = from_fields("compressor", CompressorSpec, compressor)
        object.__setattr__(of, "compressor", compressor)
    if compressor is None:
        return
    if not isinstance(compressor, CompressorSpec):
        raise SpecError(
            f"{name}.compressor={compressor!r} must be a CompressorSpec, or None for none"
        )
    for field, value, wanted in (
        ("tokens_per_entry", compressor.tokens_per_entry, of.tokens_per_entry),
        ("size", compressor.size, size),
    ):
        if wanted not in (None, value):
            raise SpecError(f"{name}.compressor.{field}={value}: an entry has {wanted}")


SCOPES = ("all", "kv_head", "head")
"""Which heads share one choice: all heads, a KV head's query heads, or one query head."""


@dataclass(frozen=True, kw_only=True)
class SparseSpec(Named):
    """The meaning of the ids that choose a token's keys: int32 (num_tokens, scope, K), -1 for none.

    Attributes:
        budget: K, the most ids of a token.
        granularity: g: id i names the g consecutive entries from i * g on. A causal layer hides those
            that the token doesn't see, so its last group may be incomplete.
        scope: `"all"`, one choice for all heads; `"kv_head"` or `"head"`, one for each.
        physical: ids are places in the cache, block * block_size + offset, instead of places in the
            token's sequence. The caller answers for what the token sees; granularity is 1.
        tokens_per_entry: m: an entry of the cache stands for m tokens. A token at position t sees entry
            e if e < (t + 1) // m.
        value_in_key: the cache holds no values: a value is the first `v_head_size` elements of its key.
        newest: there is no choice: a token attends to the newest `budget` groups that it sees, which is
            a window, or all of them.
        shares_softmax: the layer's keys join those of the spec before it in the model's list, under one
            softmax (`UnionAttention`). The first spec of such a row says whether there are sinks.
        turns_back: the output is rotated back by its token's position, because values carry their keys'
            rotation (DeepSeek-V4). A layer that rotates does so.
        compressor: what makes the entries of the cache; None: the tokens' own keys, or the caller.

    Raises:
        SpecError: a value or a combination describes no choice.

    Examples:
        >>> blocks = SparseSpec(budget=16, granularity=128, scope="kv_head")
        >>> spec = LayerSpec(kind="sparse", num_heads=64, num_kv_heads=4, head_size=128, sparse=blocks)
        >>> spec.sparse.budget
        16

    """

    budget: int
    granularity: int = 1
    scope: str = "all"
    physical: bool = False
    tokens_per_entry: int = 1
    value_in_key: bool = False
    newest: bool = False
    shares_softmax: bool = False
    turns_back: bool = False
    compressor: CompressorSpec | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("budget", "granularity", "tokens_per_entry"):
            integer(f"sparse.{name}", getattr(self, name), 1)
        choice("sparse.scope", self.scope, SCOPES)
        for name in ("physical", "value_in_key", "newest", "shares_softmax", "turns_back"):
            flag(f"sparse.{name}", getattr(self, name))
        _check_compressor(self, "sparse")
        if self.newest and (self.physical or self.scope != "all"):
            raise SpecError(
                "sparse.newest=True: the newest groups are the same for all heads; leave out physical "
                f"and scope={self.scope!r}"
            )
        if self.physical and self.granularity > 1:
            raise SpecError(
                f"sparse.granularity={self.granularity}: physical ids name single places of the cache; "
                "use 1, or ids within the sequence"
            )

    @property
    def most(self) -> int:
        """The most entries that a token attends to."""
        return self.budget * self.granularity

    def choices(self, num_heads: int, num_kv_heads: int) -> int:
        """Return how many choices a token has: the second size of the tensor.

        Args:
            num_heads: the layer's.
            num_kv_heads: the layer's.

        """
        return {"all": 1, "kv_head": num_kv_heads, "head": num_heads}[self.scope]

    def __str__(self) -> str:
        """The options of the choice that aren't the defaults, for `str(LayerSpec)`."""
        words = f"{self.budget} of {self.granularity}" if self.granularity > 1 else f"{self.budget}"
        scope = {"all": "", "kv_head": " by KV head", "head": " by head"}[self.scope]
        entries = f", entries of {self.tokens_per_entry}" if self.tokens_per_entry > 1 else ""
        pool = "" if self.compressor is None else f", {self.compressor}"
        under = ", in the softmax of the layer before" * self.shares_softmax
        which = "newest" if self.newest else "choice"
        return f"{which} {words}{scope}{', physical' * self.physical}{entries}{pool}{under}"


INDEX_FORMS = {
    "index_heads": "a choice for each index head",
    "index_pool": "candidates of several entries",
    "index_within": "candidates that another indexer chose",
    "index_part": "a budget that is a part of the candidates",
    "index_entries": "entries of several tokens",
    "index_forced": "candidates that are chosen before all others",
    "index_sum": "heads that are summed without weights",
    "index_signed": "scores without a ReLU",
    "index_fp8_e4m3": "index keys in e4m3",
    "index_fp8_scaled": "index keys in e4m3 with a scale each",
}
"""What an indexer's backend must claim beside DeepSeek-V3.2's indexer, which each has; its meaning."""
INDEX_CACHES = ("auto", "fp8_e4m3", "fp8_scaled")
ACTIVATIONS = ("relu", "none")
FOLDS = ("weighted", "sum", "none")


@dataclass(frozen=True, kw_only=True)
class IndexerSpec(Named):
    """How an indexer scores a sequence's entries and chooses among them.

    The score of entry e for the token at t is `sum_h w[t, h] * act(scale * q[t, h] . k[e])`
    (DeepSeek-V3.2, 2025). A candidate is an entry, or the best of `pool` neighbours. The `budget` best
    candidates are chosen; of equal scores the smaller id is.

    Attributes:
        num_heads: of the index queries; all heads share one index key for each entry.
        head_size: of index queries and keys, in elements.
        budget: candidates to choose; a float up to 1 is the part of those that the token sees, rounded
            up.
        activation: `"relu"` or `"none"`.
        fold: `"weighted"`: the call gives a weight for each head; `"sum"`; or `"none"`, a choice for
            each head.
        scale: 0: `head_size ** -0.5`.
        tokens_per_entry: m: a token at position t sees entry e if e < (t + 1) // m.
        pool: B: candidate c is the best of entries c * B to c * B + B - 1 that the token sees.
        forced_first: oldest candidates that are chosen before all others, within the budget.
        forced_last: newest candidates that are, too.
        tail: the incomplete last group of tokens is chosen beside the budget, as id (t + 1) // m.
        within: b: only entries in the blocks of b entries that the call gives count.
        cache_dtype: of the index keys: `"auto"`, the layer's; `"fp8_e4m3"`; or `"fp8_scaled"`, e4m3 with
            a float32 scale for each key, behind all keys of a page (DeepGEMM, 2025).
        compressor: what makes the index keys of entries; None: the caller.

    Raises:
        SpecError: a value or a combination describes no indexer.

    Examples:
        >>> IndexerSpec(num_heads=64, head_size=128, budget=2048).fold
        'weighted'

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
    cache_dtype: str = "auto"
    compressor: CompressorSpec | None = None

    __repr__ = short_repr

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
        choice("indexer.cache_dtype", self.cache_dtype, INDEX_CACHES)
        flag("indexer.tail", self.tail)
        _check_compressor(self, "indexer", self.head_size)
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
        """The number of choices of a token: the second size of the tensor."""
        return self.num_heads if self.fold == "none" else 1

    @property
    def forms(self) -> frozenset[str]:
        """The names in `INDEX_FORMS` that a backend must claim."""
        asks = {
            "index_heads": self.fold == "none",
            "index_pool": self.pool > 1,
            "index_within": self.within is not None,
            "index_part": isinstance(self.budget, float),
            "index_entries": self.tokens_per_entry > 1,
            "index_forced": self.forced_first + self.forced_last > 0,
            "index_sum": self.fold == "sum",
            "index_signed": self.activation == "none",
            f"index_{self.cache_dtype}": self.cache_dtype != "auto",
        }
        return frozenset(name for name, asked in asks.items() if asked)

    def key_bytes(self, dtype: str) -> int:
        """Return the bytes of an entry's index key.

        Args:
            dtype: the layer's.

        Returns:
            The bytes in a cache of `cache_dtype`, a scale included.

        """
        if self.cache_dtype == "auto":
            return self.head_size * ITEM_BYTES[dtype]
        return self.head_size + (4 if self.cache_dtype == "fp8_scaled" else 0)

    def __str__(self) -> str:
        """A short description of the choice, for `explain`."""
        share = self.budget if isinstance(self.budget, int) else f"{self.budget:.0%}"
        words = [f"{self.num_heads} heads of {self.head_size} for {share}"]
        words += [f"of {self.pool}"] if self.pool > 1 else []
        words += ["by head"] if self.fold == "none" else []
        words += [f"entries of {self.tokens_per_entry}"] if self.tokens_per_entry > 1 else []
        words += [self.cache_dtype] if self.cache_dtype != "auto" else []
        words += [] if self.compressor is None else [f"({self.compressor})"]
        return " ".join(words)
