"""What can a backend do? Claims are data, and `check` returns every reason against a backend."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyattn.device import Device, arch_matches
from polyattn.errors import nearest, shown
from polyattn.registry.builtin_row_formats import ROW_FORMATS
from polyattn.registry.validate import PLATFORM_NAME, is_arch_pattern, require
from polyattn.spec.features import FEATURES
from polyattn.spec.kinds import (
    DTYPES,
    FP8_FORMATS,
    KV_CACHE_DTYPES,
    LAYOUTS,
    PHASES,
    AttentionKind,
    GraphCapture,
    Role,
)
from polyattn.spec.layer import LayerSpec
from polyattn.spec.norm import OVER
from polyattn.spec.rope import PAIRINGS
from polyattn.spec.row_format import ANY_ROWS, is_rows
from polyattn.spec.sparse import INDEX_FORMS

SHARED_FEATURES = frozenset({"appends", "sliding_window", "alibi"})
"""What a launch over shared blocks may serve beside plain decodes; appends are rows of several tokens."""


@dataclass(frozen=True)
class Sizes:
    """A set of sizes that a backend allows: listed values, or a range of multiples.

    Attributes:
        values: the listed sizes; empty: the range counts.
        low: the smallest size of the range.
        high: the largest; None: no bound.
        multiple: sizes are multiples of it.
        why: the reason, for people.

    Raises:
        ValueError: the fields allow no size.

    Examples:
        >>> 96 in Sizes(multiple=32, high=256), str(Sizes(values=frozenset({64, 128})))
        (True, '64, 128')

    """

    values: frozenset[int] = frozenset()
    low: int = 1
    high: int | None = None
    multiple: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        require(self)

    def problems(self) -> Iterator[str]:
        """Yield why no set of sizes is described."""
        if any(value < 1 for value in self.values):
            yield f"Sizes.values={shown(sorted(self.values))}: sizes are 1 or more"
        if self.multiple < 1:
            yield f"Sizes.multiple={shown(self.multiple)} must be 1 or more"
        if self.low < 0:
            yield f"Sizes.low={shown(self.low)} must not be negative"
        if self.high is not None and self.high < max(self.low, 1):
            yield f"Sizes.high={shown(self.high)} is below low={shown(self.low)}: it allows no size"

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int):
            return False
        if self.values:
            return size in self.values
        return self.low <= size <= (self.high or size) and size % self.multiple == 0

    def divisor_of(self, size: int) -> int | None:
        """Return the largest allowed size that divides another, or None.

        Args:
            size: the other.

        """
        divisors = (d for d in range(size, 0, -1) if size % d == 0)
        return next((d for d in divisors if d in self), None)

    def examples(self, wanted: Iterable[int]) -> list[int]:
        """Return the listed values; for a range, those of `wanted` that it allows.

        Args:
            wanted: sizes to try.

        """
        return sorted(self.values) if self.values else [size for size in wanted if size in self]

    def __str__(self) -> str:
        words = [f"multiples of {self.multiple}"] if self.multiple > 1 else []
        if self.high:
            words.append(f"{self.low} to {self.high}")
        elif self.low > 1:
            words.append(f"{self.low} or more")
        text = ", ".join(words) or "any"
        if self.values:
            text = ", ".join(map(str, sorted(self.values)))
        return f"{text} ({self.why})" if self.why else text


def one_of(*values: int, why: str = "") -> Sizes:
    """Return a set of sizes that allows the listed ones alone.

    Args:
        values: the sizes, at least one.
        why: the reason, for people.

    Raises:
        ValueError: no size is listed, or one is below 1.

    Examples:
        >>> 64 in one_of(64, 128), 96 in one_of(64, 128)
        (True, False)

    """
    if not values:
        raise ValueError("one_of() lists no size; such a backend can serve nothing")
    return Sizes(values=frozenset(values), why=why)


def multiples(of: int, low: int | None = None, high: int | None = None) -> Sizes:
    """Return a set of sizes that allows the multiples of a number within bounds.

    Args:
        of: the number.
        low: the smallest size; default: `of`.
        high: the largest size; default: no bound.

    Raises:
        ValueError: the bounds allow no size.

    Examples:
        >>> str(multiples(8, high=256)), 20 in multiples(8)
        ('multiples of 8, 8 to 256', False)

    """
    return Sizes(low=of if low is None else low, high=high, multiple=of)


ANY_SIZE = Sizes()


SERVICES = frozenset({"store", "merge", "index"})
"""The phases beside the layer's own work."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text as a set, to declare several features at once.

    Args:
        text: words between spaces.

    Examples:
        >>> sorted(names("causal gqa lse"))
        ['causal', 'gqa', 'lse']

    """
    return frozenset(text.split())


@dataclass(frozen=True)
class Rejection:
    """One requirement that a backend doesn't meet.

    Attributes:
        field: the field of the spec or the device.
        wanted: its value, as text.
        supported: what the backend supports, as text.
        remedy: what would help, as text; "" for nothing.

    Examples:
        >>> str(Rejection("head_size", "96", "64, 128"))
        'head_size: wanted 96, supported: 64, 128'

    """

    field: str
    wanted: str
    supported: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: wanted {self.wanted}, supported: {self.supported}"
        return f"{text} ({self.remedy})" if self.remedy else text


ANY_PLATFORM = "*"
"""The platform that a backend of plain torch names: it runs wherever torch does."""
EXCLUDABLE = frozenset(
    {
        *FEATURES, *INDEX_FORMS, *PHASES, *DTYPES, *KV_CACHE_DTYPES, ANY_ROWS,
        *(role.value for role in Role), *(kind.value for kind in AttentionKind),
        "cached", "uncached", "captured", "captured_drafts", "captured_prompts",
    }
)  # fmt: skip
"""What `Capabilities.excludes` may name, beside archs and the claimed sizes (`"head_size 192"`)."""
_NO_PLATFORM = {
    "gpu": "'cuda', 'rocm', 'xpu' or 'metal'",
    "nvidia": "'cuda'",
    "amd": "'rocm'",
    "hip": "'rocm'",
    "intel": "'xpu', or 'hpu' for Gaudi",
    "gaudi": "'hpu'",
    "apple": "'metal'",
    "mps": "'metal'",
    "ascend": "'npu'",
    "trainium": "'neuron'",
    "jax": "'tpu'",
}
"""Words that a declaration can mistake for a platform's name, and what to write instead."""
_CPU_ARCHS = re.compile("x86_64|aarch64")
_ARCH_WORD = re.compile("[a-z]+_?[0-9]+[a-z]*")
"""What an arch looks like, where a platform names none: a feature's name has no number in it."""
_WORDS: dict[str, Container[str]] = {"features": FEATURES, "dtypes": DTYPES, "phases": PHASES}
"""The fields that `Capabilities.but` changes by words; a word of none of them is a cache dtype."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend claims. The conformance kit tests each claim.

    Attributes:
        platforms: platform to arch patterns (`"sm_80+"`, `"gfx942"`, `"sm_80-sm_90"`); an empty tuple
            means every arch of it.
        kinds: kinds of layers.
        roles: roles of layers.
        cpu_features: features of the device that must all be there (`"avx2"`).
        dtypes: of queries, keys and values.
        kv_cache_dtypes: of a cache's elements, or row formats by name; `"rows"`: any row format that
            `BackendInfo.rows_check` doesn't refuse.
        fp8_compute: over an e4m3 cache it rounds queries and weights to e4m3 too, so it serves only
            layers with `fp8_compute`.
        fp8_formats: e4m3 formats (`"ocp"`, `"fnuz"`) that its fp8 kernels compute.
        head_sizes: of queries and keys.
        v_head_sizes: of values.
        v_head_pairs: the (K, V) head sizes that may differ, if only some do; empty: all that
            `head_sizes` and `v_head_sizes` allow.
        gqa_ratios: query heads to a KV head; for MLA, where one latent serves all, the heads.
        latent_ranks: of MLA's latent.
        latent_ropes: sizes of its rope key.
        topks: of sparse MLA, the most tokens that a query attends to.
        conv_widths: of a short convolution.
        conv_channels: of a short convolution.
        block_sizes: tokens of a cache's block.
        preferred_block_size: the block size of a layer for which neither its spec nor another backend
            sets one.
        layouts: of a cache, the preferred one first.
        rows_layout: the preferred one of a cache of rows of bytes, where that is another; `""`: none.
        phases: `"prefill"`, `"decode"`, and `"mixed"` if one launch serves both; or `"store"`,
            `"merge"` or `"index"` alone.
        cached: True: it attends over a cache; False: to keys that a call passes whole.
        decode_query_lens: the most query tokens of a row that it takes as a decode.
        shared_prefix: its decode reads blocks of `Batch.shared_prefix` once for all their rows, in its
            own launch.
        shared_features: what that launch serves beside decodes of one token: names of `SHARED_FEATURES`.
        state_targets: of a recurrence: its decode takes a step's drafts in one launch and writes the
            state after each token to `Batch.state_targets`. For others core decodes token by token.
        padding_rows: of attention: rows of several query tokens may be padding (length 0, known to the
            device alone in a step planned by bounds), with output 0 and LSE -inf. Rows of one token
            always may. For others core refuses such a step.
        mixes_tails: with whole keys, its kernel gives weight 0 to the keys behind a sequence's last
            one. So NaN or Inf among the next sequence's first values reaches that sequence.
        by_address: its `addressed` takes uncached keys by address alone, so that a short step costs the
            host little.
        rotates: of a store: the pairings (`"neox"`, `"gptj"`) that its `run_rotated` rotates, and adds
            a bias before. For others core's torch operators do both.
        norms: of a store that rotates: the rows of queries and keys, names of `polyattn.spec.norm.OVER`,
            that its `run_rotated` norms between both. For others core's torch operators do all three.
        indexes: of an indexer: names of `polyattn.spec.sparse.INDEX_FORMS`.
        features: names of `polyattn.spec.features.FEATURES`.
        graph_capture: the highest level at which it can be captured.
        excludes: sets of names that don't work together, each with the reason. A name is a feature, a
            phase, a dtype, a cache dtype, a role, a kind, a platform, an arch, `"cached"`, `"uncached"`,
            `"captured"`, `"captured_drafts"`, `"captured_prompts"` or a size (`"head_size 192"`):
            `{"alibi", "decode"}`.
        remedies: for a feature, a dtype or a cache dtype that isn't claimed, what would bring it, or
            why nothing does.

    Raises:
        ValueError: a claim has another type than its annotation, isn't known, or contradicts another
            one.

    Examples:
        >>> claims = Capabilities(platforms={"cuda": ("sm_80+",)}, features=frozenset({"causal", "gqa"}))
        >>> spec = LayerSpec(num_heads=8, head_size=64, logit_soft_cap=30.0)
        >>> "logit_soft_cap" in claims.features
        False

    """

    platforms: Mapping[str, tuple[str, ...]]
    kinds: frozenset[AttentionKind] = frozenset({AttentionKind.ATTENTION})
    roles: frozenset[Role] = frozenset({Role.DECODER})
    cpu_features: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16"})
    kv_cache_dtypes: frozenset[str] = frozenset({"auto"})
    fp8_compute: bool = False
    fp8_formats: frozenset[str] = frozenset({"ocp"})
    head_sizes: Sizes = ANY_SIZE
    v_head_sizes: Sizes = ANY_SIZE
    v_head_pairs: frozenset[tuple[int, int]] = frozenset()
    gqa_ratios: Sizes = ANY_SIZE
    latent_ranks: Sizes = ANY_SIZE
    latent_ropes: Sizes = Sizes(low=0)
    topks: Sizes = ANY_SIZE
    conv_widths: Sizes = ANY_SIZE
    conv_channels: Sizes = ANY_SIZE
    block_sizes: Sizes = ANY_SIZE
    preferred_block_size: int = 16
    layouts: tuple[str, ...] = ("NHD",)
    rows_layout: str = ""
    phases: frozenset[str] = frozenset({"prefill", "decode"})
    cached: frozenset[bool] = frozenset({True})
    decode_query_lens: int = 1
    shared_prefix: bool = False
    shared_features: frozenset[str] = frozenset()
    state_targets: bool = False
    padding_rows: bool = False
    mixes_tails: bool = False
    by_address: bool = False
    rotates: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    indexes: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset({"causal", "gqa"})
    excludes: tuple[tuple[frozenset[str], str], ...] = ()
    remedies: Mapping[str, str] = field(default_factory=dict)
    graph_capture: GraphCapture = GraphCapture.NONE

    @property
    def attends(self) -> bool:
        """Whether it serves the layer itself, not one of the services beside it."""
        return not self.phases & SERVICES

    def but(self, *, adds: str = "", lacks: str = "", **fields: Any) -> Capabilities:
        """Return these claims with a difference, as another build's.

        Args:
            adds: words that this build claims too: features, dtypes, cache dtypes or phases.
            lacks: such words that it doesn't claim.
            fields: other fields, whole.

        Raises `ValueError` for a word that makes no difference.

        Examples:
            >>> base = Capabilities(platforms={"cuda": ()}, features=names("causal gqa lse"))
            >>> sorted(base.but(adds="alibi", lacks="lse").features)
            ['alibi', 'causal', 'gqa']

        """
        for word in sorted(names(adds) | names(lacks)):
            field = next((f for f, words in _WORDS.items() if word in words), "kv_cache_dtypes")
            claimed = fields.get(field, getattr(self, field))
            if (word in claimed) == (word in names(adds)):
                raise ValueError(
                    f"Capabilities.{field}: {word!r} makes no difference; leave it out"
                )
            fields[field] = claimed ^ {word}
        return dataclasses.replace(self, **fields)

    def __post_init__(self) -> None:
        require(self)
        for name in ("platforms", "remedies"):  # copies: checked values must not change
            object.__setattr__(self, name, dict(getattr(self, name)))

    def problems(self) -> Iterator[str]:
        """Yield what types can't say: unknown words, and claims that contradict each other."""
        yield from self._unknown_words()
        yield from self._bad_platforms()
        most, decodes = self.decode_query_lens, "decode" in self.phases
        for wrong, text in (
            (not self.cached or not self.cached <= {True, False},
             f"cached={self.cached!r} must hold True, False or both"),
            (most < 1 or (most > 1 and not decodes),
             f"decode_query_lens={most} must be 1 or more, and more than 1 needs phase 'decode'"),
            (self.shared_prefix and not (decodes and True in self.cached),
             "shared_prefix: only a backend that claims phase 'decode' over a cache reads blocks "
             "that rows share"),
            (not self.shared_features <= SHARED_FEATURES,
             f"shared_features={sorted(self.shared_features)!r} must be of "
             f"{', '.join(sorted(SHARED_FEATURES))}"),
            (self.shared_features and not self.shared_prefix,
             "shared_features: only a backend that claims shared_prefix has them"),
            (self.phases & SERVICES and len(self.phases) > 1,
             "phases: 'store', 'merge' and 'index' can't be combined with other phases"),
            (not self.indexes <= INDEX_FORMS.keys(),
             f"indexes={sorted(self.indexes)!r}: forms are {', '.join(INDEX_FORMS)}"),
            (self.indexes and "index" not in self.phases,
             "indexes: only a backend that claims phase 'index' chooses"),
            (not self.rotates <= set(PAIRINGS),
             f"rotates={sorted(self.rotates)!r}: pairings are {', '.join(PAIRINGS)}"),
            (self.rotates and "store" not in self.phases,
             "rotates: only a backend that claims phase 'store' rotates"),
            (not self.norms <= set(OVER),
             f"norms={sorted(self.norms)!r}: rows are {', '.join(OVER)}"),
            (self.norms and not self.rotates,
             "norms: only a store that claims rotates norms"),
            ("mixed" in self.phases and not {"prefill", "decode"} <= self.phases,
             "phases: 'mixed' needs both 'prefill' and 'decode'"),
            ("sink_tokens" in self.features and "sliding_window" not in self.features,
             "features: 'sink_tokens' needs 'sliding_window'"),
            (not self.features & {"causal", "non_causal"},
             "features: needs 'causal', 'non_causal' or both"),
            (self.rows_layout and self.rows_layout not in self.layouts,
             f"rows_layout={self.rows_layout!r} is not among layouts ({', '.join(self.layouts)})"),
            (self.preferred_block_size not in self.block_sizes,
             f"preferred_block_size={self.preferred_block_size} is not among block_sizes "
             f"({self.block_sizes})"),
            (any(size < 1 for pair in self.v_head_pairs for size in pair),
             f"v_head_pairs={shown(sorted(self.v_head_pairs))}: sizes are 1 or more"),
        ):  # fmt: skip
            if wrong:
                yield f"Capabilities.{text}"
        yield from self._bad_excludes()

    def _unknown_words(self) -> Iterator[str]:
        stored = {*KV_CACHE_DTYPES, ANY_ROWS, *(shipped.name for shipped in ROW_FORMATS)}
        for name, valid in (
            ("dtypes", DTYPES),
            ("kv_cache_dtypes", stored),
            ("fp8_formats", FP8_FORMATS),
            ("layouts", LAYOUTS),
            ("phases", PHASES),
            ("features", FEATURES),
            ("remedies", {*FEATURES, *DTYPES, *stored}),
        ):
            words = getattr(self, name)
            unknown = sorted(set(words) - set(valid))
            if unknown:
                own = " (of formats of your own claim 'rows' and state `rows_check`)"
                remedy = own if name == "kv_cache_dtypes" else ""
                yield f"Capabilities.{name}: unknown {unknown}{nearest(unknown[0], valid)}{remedy}"
            if not words and name != "remedies":
                yield f"Capabilities.{name} is empty: such a backend can serve nothing"

    def _bad_platforms(self) -> Iterator[str]:
        if not self.platforms:
            yield "Capabilities.platforms is empty: such a backend can run nowhere"
        for platform, archs in self.platforms.items():
            if platform != ANY_PLATFORM and not PLATFORM_NAME.fullmatch(platform):
                yield (
                    f"Capabilities.platforms: {shown(platform)} can't be a platform's name; use "
                    "lower-case letters, digits and _"
                )
            if platform in _NO_PLATFORM:
                yield (
                    f"Capabilities.platforms: {shown(platform)} is no platform; write "
                    f"{_NO_PLATFORM[platform]}"
                )
            for pattern in archs:
                if not is_arch_pattern(pattern):
                    yield (
                        f"Capabilities.platforms[{platform!r}]: {shown(pattern)} is no arch pattern; "
                        "write 'sm_90', 'sm_80+' or 'sm_80-sm_90'"
                    )
                elif re.match("sm[0-9]", pattern):
                    yield (
                        f"Capabilities.platforms[{platform!r}]: no device has the arch "
                        f"{shown(pattern)}; write {pattern.replace('sm', 'sm_')!r}"
                    )

    def _bad_excludes(self) -> Iterator[str]:
        bounded = range(1, 1 + (self.head_sizes.high or 0))
        sizes = {f"head_size {size}" for size in self.head_sizes.examples(bounded)}
        words = EXCLUDABLE | sizes | set(self.platforms)
        for together, _ in self.excludes:
            if len(together) < 2:
                yield (
                    f"Capabilities.excludes: {shown(sorted(together))} must name two things or more "
                    "that don't work together; leave one that never works out of the claims"
                )
            for word in sorted(together - words):
                if not _is_claimed_arch(word, self.platforms):
                    yield (
                        f"Capabilities.excludes: {shown(word)} is unknown{nearest(word, words)} "
                        "(an arch must be among those that platforms names)"
                    )

    def __hash__(self) -> int:
        values = (getattr(self, f.name) for f in dataclasses.fields(self))
        return hash(tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in values))


def _is_claimed_arch(word: str, platforms: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether `word` is an arch that the claims cover; of a platform without archs, a known one."""
    for platform, patterns in platforms.items():
        if any(arch_matches(pattern, word) for pattern in patterns):
            return True
        words = _CPU_ARCHS if platform == "cpu" else _ARCH_WORD
        if not patterns and platform != ANY_PLATFORM and words.fullmatch(word):
            return True
    return False


Need = Callable[..., None]
"""`check`'s inner function, as its helpers take it."""


def check(
    caps: Capabilities, spec: LayerSpec, device: Device, phase: str = "prefill"
) -> tuple[Rejection, ...]:
    """Return every reason why a backend with `caps` can't serve `phase` of `spec` on `device`.

    An empty tuple means that it can. Pure: no import, no device access. What a layer computes doesn't
    concern a store, a merge or an indexer: only platform, kind and dtypes count. For a store the keys'
    form and scales and what it excludes count too, for an indexer its own spec.
    """
    rejections: list[Rejection] = []

    def need(ok: bool, field: str, wanted: object, supported: object, remedy: str = "") -> None:
        if not ok:
            rejections.append(Rejection(field, str(wanted), _words(supported), remedy))

    _check_device(caps, device, need)
    need(spec.kind in caps.kinds, "kind", spec.kind.value, [k.value for k in caps.kinds])
    need(phase in caps.phases, "phase", phase, caps.phases, f"name another backend for {phase}")
    remedy = caps.remedies.get(spec.dtype, "cast the model")
    need(spec.dtype in caps.dtypes, "dtype", spec.dtype, caps.dtypes, remedy)
    if phase == "merge":
        return tuple(rejections)
    if phase == "index":
        _check_indexer(caps, spec, device, need)
        return tuple(rejections)
    if spec.cached:
        _check_cache(caps, spec, device, need)
    _check_sizes(caps, spec, need)
    if phase != "store":
        _check_computation(caps, spec, device, need)
    else:
        _check_features(caps, spec.features & STORED, need)
    _check_excludes(caps, spec, device, phase, need)
    return tuple(rejections)


def _check_sizes(caps: Capabilities, spec: LayerSpec, need: Need) -> None:
    need(spec.head_size in caps.head_sizes, "head_size", spec.head_size, caps.head_sizes)
    if spec.v_head_size != spec.head_size:
        wide = spec.v_head_size in caps.v_head_sizes
        need(wide, "v_head_size", spec.v_head_size, caps.v_head_sizes)
        pair = (spec.head_size, spec.v_head_size)
        need(
            not caps.v_head_pairs or pair in caps.v_head_pairs or spec.latent is not None,
            "v_head_size",
            f"{pair[0]}/{pair[1]}",
            [f"{k}/{v}" for k, v in caps.v_head_pairs],
        )


def _check_indexer(caps: Capabilities, spec: LayerSpec, device: Device, need: Need) -> None:
    """A layer's indexer alone: its queries' and keys' size, and what it chooses by."""
    indexer = spec.indexer
    assert indexer is not None
    size, forms = indexer.head_size, indexer.forms
    need(size in caps.head_sizes, "indexer.head_size", size, caps.head_sizes)
    _check_features(caps, spec.features & LEVELS, need)
    for form in sorted(forms - caps.indexes):
        need(False, form, INDEX_FORMS[form], caps.indexes or "none of the forms")
    asked = forms | {spec.dtype, device.arch, device.platform} | (spec.features & LEVELS)
    for together, why in caps.excludes:
        need(not together <= asked, " with ".join(sorted(together)), "together", "apart", why)


def _check_computation(caps: Capabilities, spec: LayerSpec, device: Device, need: Need) -> None:
    need(spec.role in caps.roles, "role", spec.role.value, [r.value for r in caps.roles])
    if spec.recurrent is None:
        words = {True: "over a cache", False: "given keys and values"}
        sources = [words[c] for c in caps.cached]
        need(spec.cached in caps.cached, "cached", words[bool(spec.cached)], sources)
        ratio = spec.num_heads if spec.latent else spec.gqa_ratio
        need(ratio in caps.gqa_ratios, "gqa_ratio", ratio, caps.gqa_ratios)
    if spec.latent:
        rank = spec.latent.rank
        need(rank in caps.latent_ranks, "latent_rank", rank, caps.latent_ranks)
        rope = spec.latent.rope_head_size
        need(rope in caps.latent_ropes, "latent_rope", rope, caps.latent_ropes)
        if spec.sparse is not None:
            need(spec.sparse.most in caps.topks, "topk", spec.sparse.most, caps.topks)
    if spec.kind is AttentionKind.SHORT_CONV and spec.recurrent:
        width = spec.recurrent.conv_width
        need(width in caps.conv_widths, "conv_width", width, caps.conv_widths)
        need(spec.num_heads in caps.conv_channels, "channels", spec.num_heads, caps.conv_channels)
    asked = spec.features
    _check_features(caps, asked, need)
    if asked & {"fp8_inputs", "fp8_output"}:
        need(
            device.fp8 != "fnuz",
            "fp8 format",
            "ocp (queries, keys, values and outputs)",
            f"{device.fp8} (what {device.arch} computes)",
            "leave qkv_dtype and out_dtype out",
        )
    need(
        spec.graph_capture <= caps.graph_capture,
        "graph_capture",
        spec.graph_capture.name.lower(),
        f"up to {caps.graph_capture.name.lower()}",
        "capture fewer kinds of steps, or run this layer outside the graph",
    )


def _check_excludes(
    caps: Capabilities, spec: LayerSpec, device: Device, phase: str, need: Need
) -> None:
    asked = spec.features
    asked |= {phase, spec.dtype, spec.kv_cache_dtype, spec.role.value, spec.kind.value}
    asked |= {device.platform, device.arch}
    asked |= {ANY_ROWS} if spec.in_rows else set()
    asked |= {"cached" if spec.cached else "uncached", f"head_size {spec.head_size}"}
    asked |= {"captured"} if spec.graph_capture else set()
    asked |= {"captured_drafts"} if spec.graph_capture >= GraphCapture.UNIFORM else set()
    asked |= {"captured_prompts"} if spec.graph_capture is GraphCapture.ANY else set()
    for together, why in caps.excludes:
        need(not together <= asked, " with ".join(sorted(together)), "together", "apart", why)


def takes(caps: Capabilities, kv_cache_dtype: str) -> bool:
    """Return whether a claim includes a cache's dtype, by name or as any row format."""
    if kv_cache_dtype in caps.kv_cache_dtypes:
        return True
    return ANY_ROWS in caps.kv_cache_dtypes and is_rows(kv_cache_dtype)


def rotates(caps: Capabilities, spec: LayerSpec) -> bool:
    """Return whether a store itself norms and rotates; for a layer of neither, whether it adds a bias."""
    rope = spec.rope
    if spec.qk_norm is not None and spec.qk_norm.over not in caps.norms:
        return False
    if rope is None or not rope.rotary_size:
        return bool(caps.rotates)
    return rope.pairing in caps.rotates


STORED = frozenset({"tensor_scales", "head_scales", "fp8_inputs"})
"""The features that a store must claim, too: they are of the keys and values that it is given."""


LEVELS = frozenset({"batch_invariant", "step_invariant", "call_invariant"})
"""The features that an indexer must claim, too: what it chooses decides what a token attends to."""


def _check_features(caps: Capabilities, asked: frozenset[str], need: Need) -> None:
    for name in sorted(asked - caps.features):
        remedy = caps.remedies.get(name) or _FEATURE_REMEDIES.get(name, "")
        need(False, name, FEATURES[name], sorted(caps.features), remedy)


_FEATURE_REMEDIES = {
    "lse": "ask without needs_lse",
    "length_bounds": "pass each step's lengths on the host, and plan the step",
    "deterministic": "ask without deterministic",
    "batch_invariant": "ask without batch_invariant",
    "step_invariant": "ask for batch_invariant='batch'",
    "call_invariant": "ask for batch_invariant='steps'",
    "machine_invariant": "ask for batch_invariant='calls'",
    "tensor_scales": "pass the scales as numbers: scales='number'",
    "head_scales": "pass one scale for all heads",
    "fp8_inputs": "dequantise before: qkv_dtype='auto'",
    "fp8_output": "quantise after: out_dtype='auto'",
}


def _check_device(caps: Capabilities, device: Device, need: Need) -> None:
    everywhere = ANY_PLATFORM in caps.platforms
    here = everywhere or device.platform in caps.platforms
    need(here, "platform", device.platform, list(caps.platforms))
    archs = caps.platforms.get(device.platform, ())
    fits = not archs or any(arch_matches(pattern, device.arch) for pattern in archs)
    need(fits, "arch", device.arch, archs)
    missing = caps.cpu_features - device.features
    need(not missing, "cpu_features", _words(missing), _words(device.features) or "none here")


def _check_cache(caps: Capabilities, spec: LayerSpec, device: Device, need: Need) -> None:
    cached = spec.kv_cache_dtype
    remedy = caps.remedies.get(cached, "")
    need(takes(caps, cached), "kv_cache_dtype", cached, caps.kv_cache_dtypes, remedy)
    if cached.startswith("fp8_e4m3") and device.fp8:
        need(
            device.fp8 in caps.fp8_formats,
            "fp8 format",
            f"{device.fp8} (what {device.arch} computes)",
            caps.fp8_formats,
            "the two e4m3 formats differ by a factor of two; use fp8_e5m2 or another backend",
        )
    if cached == "fp8_e4m3" and caps.fp8_compute:
        need(
            spec.fp8_compute,
            "fp8_compute",
            f"queries and weights in {spec.dtype}",
            "all in e4m3",
            "set fp8_compute=True in the spec where its error is acceptable",
        )
    if spec.block_size is not None and spec.recurrent is None:
        need(
            caps.block_sizes.divisor_of(spec.block_size) is not None,
            "block_size",
            spec.block_size,
            f"{caps.block_sizes}, or a multiple of one of them",
            "leave block_size out and the selector chooses one",
        )


def _words(value: object) -> str:
    if isinstance(value, (frozenset, set, list, tuple)):
        return ", ".join(sorted(map(str, value)))
    return str(value)
