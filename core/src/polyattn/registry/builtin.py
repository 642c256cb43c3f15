"""Which backends does core bring? Plain torch for what every step needs, and the reference."""

from __future__ import annotations

from typing import Any

from polyattn.registry.capabilities import ANY_PLATFORM, STORED, Capabilities
from polyattn.registry.info import BackendInfo, Priority, Proof
from polyattn.spec.features import FEATURES, RECURRENT
from polyattn.spec.kinds import DTYPES, FP8_FORMATS, KV_CACHE_DTYPES, LAYOUTS, AttentionKind, Role
from polyattn.spec.norm import OVER
from polyattn.spec.rope import PAIRINGS
from polyattn.spec.row_format import ANY_ROWS
from polyattn.spec.sparse import INDEX_FORMS

_EVERYWHERE = {
    "platforms": {ANY_PLATFORM: ()},
    "dtypes": frozenset(DTYPES),
    "kv_cache_dtypes": frozenset({*KV_CACHE_DTYPES, ANY_ROWS}),
    "fp8_formats": frozenset(FP8_FORMATS),
    "kinds": frozenset(kind for kind in AttentionKind if not kind.is_recurrent),
    "layouts": LAYOUTS,
}

TORCH_STORE = BackendInfo(
    name="TORCH_STORE",
    summary="keys and values normed, rotated and scattered to their slots by torch's operators",
    path="polyattn.runtime.store:TorchStore",
    capabilities=Capabilities(
        phases=frozenset({"store"}),
        rotates=frozenset(PAIRINGS),
        norms=frozenset(OVER),
        features=frozenset({"causal", "gqa"}) | STORED,
        **_EVERYWHERE,  # type: ignore[arg-type]
    ),
    priorities=(Priority(score=5, why="correct everywhere; several launches on an accelerator"),),
    proof={"cpu": Proof.MEASURED, "sm_90": Proof.MEASURED},
)

TORCH_MERGE = BackendInfo(
    name="TORCH_MERGE",
    summary="attention states merged by torch's elementwise operators",
    path="polyattn.runtime.merge:TorchMerge",
    capabilities=Capabilities(phases=frozenset({"merge"}), **_EVERYWHERE),  # type: ignore[arg-type]
    priorities=(Priority(score=5, why="correct everywhere; several launches on an accelerator"),),
    proof={"cpu": Proof.MEASURED, "sm_90": Proof.MEASURED},
)


_INDEXING: dict[str, Any] = {
    "kinds": frozenset({AttentionKind.SPARSE, AttentionKind.SPARSE_MLA}),
    "phases": frozenset({"index"}),
    "indexes": frozenset(INDEX_FORMS),
}
TORCH_INDEX = BackendInfo(
    name="TORCH_INDEX",
    summary="keys scored and chosen by torch's operators",
    path="polyattn.families.sparse.torch_index:TorchIndex",
    capabilities=Capabilities(
        features=Capabilities.features | {"batch_invariant", "step_invariant"},
        excludes=tuple(
            (frozenset({"batch_invariant", platform}), "a GPU's products were not compared")
            for platform in ("cuda", "rocm")
        ),
        **_EVERYWHERE | _INDEXING | {"platforms": {ANY_PLATFORM: (), "cuda": (), "rocm": ()}},
    ),
    priorities=(Priority(score=5, why="correct everywhere; several launches on an accelerator"),),
    proof={"cpu": Proof.MEASURED},
)


def _vanilla(name: str, path: str, summary: str, **claims: Any) -> BackendInfo:
    """Return a reference, which serves only if a user names it."""
    fields = _EVERYWHERE | claims
    return BackendInfo(
        name=name,
        summary=f"{summary}; slow, only by name",
        path=path,
        capabilities=Capabilities(**fields),
        by_name_only=True,
        priorities=(Priority(score=-100, why="the definition that others are held to; slow"),),
        proof={"cpu": Proof.MEASURED},
    )


_LATENT = frozenset({"causal", "v_head_size", "lse", "deterministic"})

VANILLA = _vanilla(
    "VANILLA",
    "polyattn.families.attention.vanilla:Vanilla",
    "the float64 reference of attention, every feature, on the host",
    kinds=frozenset({AttentionKind.ATTENTION}),
    roles=frozenset(Role),
    cached=frozenset({True, False}),
    padding_rows=True,
    # Its products are torch's, whose order of sums in float64 follows from the numbers of rows; where
    # bits are specified, it adds one number at a time.
    features=frozenset(FEATURES) - RECURRENT - {"step_invariant", "call_invariant"},
)
VANILLA_MLA = _vanilla(
    "VANILLA_MLA",
    "polyattn.families.attention.vanilla:VanillaMLA",
    "the float64 reference of absorbed MLA decode, on the host",
    kinds=frozenset({AttentionKind.MLA}),
    phases=frozenset({"decode"}),
    features=_LATENT,
)
VANILLA_MLA_SPARSE = _vanilla(
    "VANILLA_MLA_SPARSE",
    "polyattn.families.mla.vanilla:VanillaSparseMLA",
    "the float64 reference of sparse MLA, on the host",
    kinds=frozenset({AttentionKind.SPARSE_MLA}),
    features=_LATENT,
)
VANILLA_SCAN = _vanilla(
    "VANILLA_SCAN",
    "polyattn.families.recurrent.vanilla:VanillaScan",
    "the float64 recurrences as they are published, a token at a time, on the host",
    kinds=frozenset(kind for kind in AttentionKind if kind.is_recurrent),
    features=_LATENT - {"lse"} | {"gqa", "variant"} | RECURRENT,
)

VANILLA_INDEX = _vanilla(
    "VANILLA_INDEX",
    "polyattn.families.sparse.torch_index:VanillaIndex",
    "the float64 reference of an indexer, a token at a time, on the host",
    features=Capabilities.features | {"batch_invariant", "step_invariant"},
    **_INDEXING,
)

BUILTIN = (
    TORCH_STORE, TORCH_MERGE, TORCH_INDEX, VANILLA, VANILLA_MLA, VANILLA_MLA_SPARSE, VANILLA_SCAN,
    VANILLA_INDEX,
)  # fmt: skip
