"""Which liars are there? Every class of these modules that says which checks must find it."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from liars import (
    captures,
    functions,
    indexers,
    lasting,
    latents,
    masks,
    plain,
    prefixes,
    recurrences,
    rotations,
    services,
    shapes,
    sizes,
    steps,
    unseen,
    variances,
)  # fmt: skip
from liars.plain import HonestBounds, HonestGraph, Plain
from polyattn.families.sparse.torch_index import TorchIndex
from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    GraphCapture,
    Priority,
    Role,
    hookimpl,
    names,
)
from polyattn.registry.builtin import TORCH_INDEX, TORCH_MERGE, TORCH_STORE
from polyattn.runtime.merge import TorchMerge
from polyattn.runtime.store import TorchStore
from polyattn_cpu.hooks import TORCH_MLA, TORCH_MLA_SPARSE, TORCH_SCAN, TORCH_SDPA
from polyattn_cpu.mla import TorchMLA, TorchSparseMLA
from polyattn_cpu.recurrent import TorchScan

ATTENTION = Capabilities(
    platforms={"cpu": ()},
    roles=frozenset(Role),
    cached=frozenset({True, False}),
    dtypes=names("float32 bfloat16"),
    kv_cache_dtypes=names("auto int8"),
    layouts=("NHD", "HND"),
    features=names(
        "causal non_causal gqa sliding_window chunked sink_tokens alibi v_head_size logit_soft_cap "
        "learned_sinks tensor_scales head_scales fp8_output lse deterministic batch_invariant"
    ),
    padding_rows=True,
)
GRAPHS = ATTENTION.but(
    roles=frozenset({Role.DECODER}), cached=frozenset({True}),
    graph_capture=GraphCapture.SINGLE_TOKEN_DECODE,
)  # fmt: skip
BOUNDS = GRAPHS.but(graph_capture=GraphCapture.NONE, adds="length_bounds")
FUNCTIONS = TORCH_SDPA.capabilities.but(
    roles=frozenset({Role.DECODER}), dtypes=names("float32"), kv_cache_dtypes=names("auto"),
    platforms={"cpu": ()},
)  # fmt: skip
SAME = ATTENTION.but(
    roles=frozenset({Role.DECODER}), dtypes=names("bfloat16"), kv_cache_dtypes=names("auto"),
    features=names("causal gqa lse batch_invariant step_invariant call_invariant"),
)  # fmt: skip
SCANS = TORCH_SCAN.capabilities.but(
    kinds=frozenset({AttentionKind.GDN, AttentionKind.MAMBA2}), dtypes=names("float32")
)
CLAIMS: tuple[tuple[type[Any], Capabilities], ...] = (
    (shapes.LastOfShortRows, ATTENTION.but(decode_query_lens=8)),
    (HonestBounds, BOUNDS),
    (
        variances.MasksListedByTheStep,
        SAME.but(adds="custom_mask", lacks="step_invariant call_invariant"),
    ),
    (variances.Same, SAME),
    (
        variances.Specified,
        SAME.but(
            dtypes=names("float32"),
            features=names("causal gqa lse batch_invariant machine_invariant"),
        ),
    ),
    (variances.OneSequenceAtATime, SAME),
    (variances.PlansForGraphs, GRAPHS.but(features=SAME.features)),
    (variances.SplitsOfTheLongest, GRAPHS.but(features=SAME.features)),
    (variances.ScoresByTheBatch, TORCH_INDEX.capabilities.but(dtypes=names("float32"))),
    (variances.ChunksFromTheStep, SCANS),
    (variances.RoundsBetweenSteps, SCANS),
    (variances.ScansByTheBatch, SCANS),
    (variances.StatesByTheBatch, SCANS),
    (captures.HonestMixedScan, SCANS.but(graph_capture=GraphCapture.ANY)),
    (captures.HonestMixed, GRAPHS.but(graph_capture=GraphCapture.ANY)),
    (prefixes.Forest, GRAPHS.but(shared_prefix=True)),
    (HonestGraph, GRAPHS),
    (Plain, ATTENTION),
    (functions.Functions, FUNCTIONS),
    (captures.HonestLatentGraph, TORCH_MLA.capabilities.but(graph_capture=GraphCapture.ANY)),
    (TorchMLA, TORCH_MLA.capabilities),
    (TorchSparseMLA, TORCH_MLA_SPARSE.capabilities),
    (captures.HonestDrafts, TORCH_SCAN.capabilities.but(state_targets=True)),
    (TorchScan, TORCH_SCAN.capabilities),
    (TorchStore, TORCH_STORE.capabilities),
    (TorchMerge, TORCH_MERGE.capabilities),
    (TorchIndex, TORCH_INDEX.capabilities.but(dtypes=names("float32"))),
)
MODULES: tuple[ModuleType, ...] = (
    plain, masks, shapes, steps, latents, recurrences, services, rotations, functions,
    prefixes, captures, sizes, lasting, variances, unseen, indexers,
)  # fmt: skip
BASES = {
    plain.Plain, plain.HonestBounds, masks.Numeric, recurrences.Scan, recurrences.OtherForm,
    services.Store, services.Rounding, services.Merge, services.Weighing, rotations.Rotating,
    functions.Functions, prefixes.Forest, sizes.When, lasting.Late, lasting.Meddler, variances.Same,
    variances.Specified, indexers.Index, indexers.OtherIndexer, *unseen.BASES,
}  # fmt: skip


def classes() -> list[type[Any]]:
    """Return every liar and every honest one, in the order of the modules."""
    return [
        found
        for module in MODULES
        for found in vars(module).values()
        if isinstance(found, type)
        and found.__module__ == module.__name__
        and hasattr(found, "by")
        and found not in BASES
    ]


def name_of(kind: type[Any]) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).upper()


def info(kind: type[Any]) -> BackendInfo:
    found = (claims for base, claims in CLAIMS if issubclass(kind, base))
    claims = getattr(kind, "claimed", None) or next(found)
    return BackendInfo(
        name=name_of(kind),
        summary="a liar, or what it would be if it were honest",
        path=f"{kind.__module__}:{kind.__name__}",
        capabilities=claims,
        priorities=(Priority(score=-100, why="for tests of the kit"),),
    )


class Plugin:
    """Declares all of them, below every backend that is meant to be used."""

    @hookimpl
    def polyattn_api_versions(self) -> tuple[int, int]:
        return (1, 1)

    @hookimpl
    def polyattn_backends(self) -> list[BackendInfo]:
        return [info(kind) for kind in classes()]
