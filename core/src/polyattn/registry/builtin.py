"""What does core bring itself? The plain torch forms of the two roles that every step needs."""

from __future__ import annotations

from polyattn.registry.capabilities import ANY_PLATFORM, Capabilities
from polyattn.registry.info import BackendInfo, Priority, Proof
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, AttentionKind
from polyattn.spec.rope import PAIRINGS

_EVERYWHERE = {
    "platforms": {ANY_PLATFORM: ()},
    "dtypes": frozenset(DTYPES),
    "kv_cache_dtypes": frozenset(KV_CACHE_DTYPES),
    "fp8_formats": frozenset({"ocp", "fnuz"}),
    "kinds": frozenset(kind for kind in AttentionKind if not kind.is_recurrent),
    "layouts": ("NHD", "HND"),
}

TORCH_STORE = BackendInfo(
    name="TORCH_STORE",
    summary="keys and values rotated and scattered to their slots by torch's operators",
    path="polyattn.runtime.store:TorchStore",
    capabilities=Capabilities(
        phases=frozenset({"store"}),
        rotates=frozenset(PAIRINGS),
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

BUILTIN = (TORCH_STORE, TORCH_MERGE)
