"""Which backends does a layer need? Some layers are two computations, or differ by phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from polyattn.errors import SpecError
from polyattn.spec.kinds import AttentionKind, GraphCapture, Invariance, Role
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrent import RecurrentSpec
from polyattn.spec.sparse import SparseSpec


@cache
def convolution(spec: LayerSpec) -> LayerSpec | None:
    """Return the short convolution that comes before a recurrence, as a layer of its own.

    Its channels: Mamba-1's x; Mamba-2's x, B and C; a delta rule's q, k and v.
    """
    form = spec.recurrent
    if form is None or not form.conv_width or spec.kind is AttentionKind.SHORT_CONV:
        return None
    channels = spec.num_heads * spec.head_size
    if spec.kind is AttentionKind.MAMBA2:
        channels += 2 * spec.num_kv_heads * form.state_size
    elif spec.kind in (AttentionKind.GDN, AttentionKind.KDA):
        channels = spec.num_heads * spec.v_head_size + 2 * spec.num_kv_heads * spec.head_size
    return spec.replace(
        kind=AttentionKind.SHORT_CONV,
        num_heads=channels,
        num_kv_heads=channels,
        head_size=1,
        v_head_size=1,
        scale=0.0,
        recurrent=RecurrentSpec(conv_width=form.conv_width, activation=form.activation),
    )


@cache
def expanded(spec: LayerSpec) -> LayerSpec:
    """Return the attention layer that an MLA layer's prefill computes.

    It is multi-head attention over keys and values that the step makes from latents (DeepSeek-V2, 2024,
    section 2.1). These keys don't outlive the step, so the layer has no cache.

    Args:
        spec: an MLA layer's spec.

    Returns:
        The spec of that layer, with `cached=False`; it asks for the LSE, since its context is a part
        apart.

    Examples:
        >>> from polyattn import LatentSpec
        >>> latent = LatentSpec(rank=512, rope_head_size=64)
        >>> mla = LayerSpec(kind="mla", num_heads=16, head_size=192, v_head_size=128, latent=latent)
        >>> layer = expanded(mla)
        >>> layer.num_kv_heads, layer.head_size, layer.cached
        (16, 192, False)

    """
    return spec.replace(
        kind=AttentionKind.ATTENTION,
        num_kv_heads=spec.num_heads,
        latent=None,
        rope=None,
        cached=False,
        kv_source=None,
        kv_cache_dtype="auto",
        fp8_compute=False,
        block_size=None,
        graph_capture=GraphCapture.NONE,
        length_bounds=False,
        needs_lse=True,
    )


@cache
def over_context(spec: LayerSpec) -> LayerSpec:
    """Return the layer for keys that all come before its queries, where a causal mask hides nothing.

    Only for layers to which a key's position doesn't matter: without windows, chunks and ALiBi.
    """
    return spec.replace(causal=False) if spec.causal else spec


@cache
def expanded_context(spec: LayerSpec) -> LayerSpec:
    """Return the other part of an MLA layer's chunked prefill: queries see every cached token."""
    return over_context(expanded(spec)).replace(role=Role.CROSS)


@cache
def absorbed(spec: LayerSpec) -> LayerSpec:
    """Return the attention layer that an MLA layer's decode computes.

    It is multi-query attention: the one key of a token is its latent beside its rope key, and the value
    is the latent (DeepSeek-V2, 2024, section 2.1: W_UK is absorbed into the query). Where bits don't
    follow from the step, its rows are single tokens, so it needs the first level alone.

    Args:
        spec: an MLA layer's spec.

    Returns:
        The spec of that layer, over the same cache.

    Raises:
        AssertionError: the spec has no `latent`.

    Examples:
        >>> from polyattn import LatentSpec
        >>> latent = LatentSpec(rank=512, rope_head_size=64)
        >>> mla = LayerSpec(kind="mla", num_heads=16, head_size=192, v_head_size=128, latent=latent)
        >>> layer = absorbed(mla)
        >>> layer.num_kv_heads, layer.head_size, layer.v_head_size
        (1, 576, 512)

    """
    assert spec.latent is not None
    return spec.replace(
        kind=AttentionKind.ATTENTION,
        num_kv_heads=1,
        head_size=spec.latent.size,
        v_head_size=spec.latent.rank,
        scale=spec.scale,
        latent=None,
        kv_source=None,
        rope=None,
        sparse=None,
        indexer=None,
        batch_invariant=min(spec.batch_invariant, Invariance.BATCH),
    )


@cache
def unrotated(spec: LayerSpec) -> LayerSpec:
    """Return the layer for queries and keys that are already normed and rotated.

    A rope with positions within the cache stays, because attention itself applies it.
    """
    spec = spec if spec.qk_norm is None else spec.replace(qk_norm=None)
    if spec.rope is None or spec.rope.positions == "cache":
        return spec
    return spec.replace(rope=None)


DEFAULT_BLOCK = 64
"""Tokens in a block of a sparse layer's cache, unless the spec or its granularity has more."""


def sparse_blocks(spec: LayerSpec) -> tuple[int, int]:
    """Return a sparse layer's block size, and the fewest consecutive entries that a choice names."""
    assert spec.sparse is not None
    size = spec.block_size or max(DEFAULT_BLOCK, spec.sparse.granularity)
    return size, math.gcd(size, spec.sparse.granularity)


@cache
def paged(spec: LayerSpec, accelerator: bool, nhd: bool) -> LayerSpec:
    """Return the attention layer that a sparse layer runs as.

    It is a decode of each token and KV head over pages of its own. A page is the consecutive entries that
    an id names. Where all heads have one choice and a page has them side by side (`nhd`), one row reads
    them all. An `accelerator` gets a row for each head, which fills it, and it alone knows their lengths.
    Sinks are added afterwards, because the rows of a call don't share them.
    """
    sparse = spec.sparse
    assert sparse is not None
    kv_heads = spec.num_kv_heads if nhd and sparse.scope == "all" and not accelerator else 1
    heads = 1 if sparse.scope == "head" else spec.gqa_ratio
    return spec.replace(
        kind=AttentionKind.ATTENTION,
        causal=True,
        num_heads=heads * kv_heads,
        num_kv_heads=kv_heads,
        block_size=sparse_blocks(spec)[1],
        kv_source=None,
        rope=None,
        sparse=None,
        indexer=None,
        learned_sinks=False,
        needs_lse=spec.needs_lse or spec.learned_sinks,
        length_bounds=accelerator or bool(spec.graph_capture) or spec.length_bounds,
    )


@cache
def over_rows(spec: LayerSpec) -> LayerSpec | None:
    """Return the MLA layer over chosen rows that a sparse layer runs as as well, or None.

    One KV head whose value is the first part of its key is MLA, absorbed. Sinks are added afterwards.
    """
    sparse = spec.sparse
    assert sparse is not None
    if not sparse.value_in_key or sparse.choices(spec.num_heads, spec.num_kv_heads) > 1:
        return None
    if spec.num_kv_heads > 1:
        return None
    return spec.replace(
        kind=AttentionKind.SPARSE_MLA,
        causal=True,
        num_kv_heads=spec.num_heads,
        block_size=None,
        kv_source=None,
        rope=None,
        indexer=None,
        learned_sinks=False,
        needs_lse=spec.needs_lse or spec.learned_sinks,
        graph_capture=min(spec.graph_capture, GraphCapture.SINGLE_TOKEN_DECODE),
        length_bounds=False,
        latent=LatentSpec(rank=spec.v_head_size, rope_head_size=spec.head_size - spec.v_head_size),
        sparse=SparseSpec(budget=sparse.budget, granularity=sparse.granularity),
    )


def questions(
    spec: LayerSpec,
    phase: str,
    accelerator: bool = False,
    kinds: frozenset[AttentionKind] = frozenset(),
    nhd: bool = False,
) -> tuple[LayerSpec, ...]:
    """Return the specs that a backend for `phase` must serve: `spec`, or the layers that it runs as.

    On an `accelerator` the host can't wait for a sparse layer's choice. `kinds`: the backend's, which
    say as what it would run one. `nhd`: whether it reads such a layer's cache as tokens of all heads, on
    which no claim depends.
    """
    if spec.kind is AttentionKind.SPARSE and phase in ("prefill", "decode"):
        rows = over_rows(spec) if AttentionKind.SPARSE_MLA in kinds else None
        return (rows or paged(spec, accelerator, nhd),)
    if spec.kind is AttentionKind.MLA and phase == "prefill" and not by_token(spec):
        return expanded(spec), expanded_context(spec)
    if spec.dense_context:
        return (windowed(spec), dense(spec)) if phase == "prefill" else (windowed(spec),)
    return (spec,)


def by_token(spec: LayerSpec) -> bool:
    """Whether every token is a decode: of sparse layers, and of MLA where steps must change no bit."""
    steps = spec.batch_invariant >= Invariance.STEPS
    return spec.kind is AttentionKind.SPARSE or (spec.kind is AttentionKind.MLA and steps)


def asked_phase(spec: LayerSpec, phase: str) -> str:
    """Return the phase that a backend must serve."""
    return "decode" if phase == "prefill" and by_token(spec) else phase


def dense(spec: LayerSpec) -> LayerSpec:
    """Return the layer that computes a whole prompt under `dense_context`: it sees all its keys."""
    return spec.replace(dense_context=False, sliding_window=None, sink_tokens=0, chunk_size=None)


def windowed(spec: LayerSpec) -> LayerSpec:
    """Return the layer that computes all other rows under `dense_context`."""
    return spec.replace(dense_context=False) if spec.dense_context else spec


def parts(spec: LayerSpec) -> tuple[LayerSpec, ...]:
    """Return the layer, after its short convolution if it has one."""
    before = convolution(spec)
    return (spec,) if before is None else (before, spec)


def _grouped(specs: Sequence[LayerSpec], index: int) -> LayerSpec:
    """Return the spec of a layer that reads another's keys: its source's."""
    source = specs[index].kv_source
    own = specs[index].replace(kv_source=None)
    if source is not None and source < index and own.chooses and own.indexer is None:
        own = own.replace(indexer=specs[source].indexer)  # it takes the choice of a layer before it
    if source is None or source >= index or specs[source] != own:
        raise SpecError(
            f"layer {index}: kv_source={source} must be an earlier layer that computes the same and "
            "keeps keys of its own"
        )
    return own


def group_layers(specs: Iterable[LayerSpec]) -> dict[LayerSpec, list[int]]:
    """Return each distinct part with the indices of its layers, in order of first appearance.

    A layer with a `kv_source` joins its source's group. Raises `SpecError` where it can't.
    """
    groups: dict[LayerSpec, list[int]] = {}
    specs = list(specs)
    for index, spec in enumerate(specs):
        for part in parts(_grouped(specs, index) if spec.kv_source is not None else spec):
            groups.setdefault(part, []).append(index)
    return groups


def choice_sources(specs: Sequence[LayerSpec], layers: Iterable[int]) -> tuple[int | None, ...]:
    """Return for each of `layers` the index of the layer whose indexer chooses for it, or None.

    That is the layer itself, or the nearest one before it that has an indexer.
    """
    return tuple(
        _nearest(specs, index, lambda spec: spec.indexer is not None)
        if specs[index].chooses
        else None
        for index in layers
    )


def candidate_sources(specs: Sequence[LayerSpec], layers: Iterable[int]) -> tuple[int | None, ...]:
    """Return for each of `layers` the layer whose choice of blocks its indexer stays within, or None.

    That is the nearest one before it whose candidates are blocks of so many entries.
    """

    def source(index: int) -> int | None:
        own = specs[index].indexer
        if own is None or own.within is None:
            return None
        return _nearest(
            specs, index - 1, lambda spec: bool(spec.indexer and spec.indexer.pool == own.within)
        )

    return tuple(map(source, layers))


def _nearest(
    specs: Sequence[LayerSpec], index: int, wanted: Callable[[LayerSpec], bool]
) -> int | None:
    return next((i for i in range(index, -1, -1) if wanted(specs[i])), None)


def kv_sources(specs: Sequence[LayerSpec], layers: Iterable[int]) -> tuple[int, ...]:
    """Return for each of `layers` the index of the layer whose cache it reads."""
    sources = ((index, specs[index].kv_source) for index in layers)
    return tuple(index if source is None else source for index, source in sources)
