"""vLLM on polyattn: `register` is its plugin, which vLLM calls in each of its processes.

Where vLLM lets a backend be chosen, ours is `--attention-backend CUSTOM`, for MLA models too. On a CPU it
lets none be chosen: there CPU_ATTN, CPU_MLA and AMX_MLA are ours wherever this package is installed, and
`VLLM_PLUGINS=` (empty) leaves it out.
"""

from __future__ import annotations

from typing import Any

from polyattn.host import integrations

ATTENTION = "polyattn_vllm.attention.PolyattnBackend"
MLA = "polyattn_vllm.mla.PolyattnMLABackend"


def register() -> None:
    """Put polyattn's backends into vLLM's registry."""
    _check_version()
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(Names.CUSTOM, "polyattn_vllm.CUSTOM")
    if current_platform.is_cpu():
        for name, path in (("CPU_ATTN", ATTENTION), ("CPU_MLA", MLA), ("AMX_MLA", MLA)):
            if name in Names.__members__:  # AMX_MLA since vLLM 0.29
                register_backend(Names[name], path)


def _check_version() -> None:
    """Raise where vLLM is not of the versions that this distribution's metadata names."""
    for integration in integrations():
        if integration.distribution == "polyattn-vllm" and integration.problem:
            raise RuntimeError(f"{integration.problem}; or leave it out: VLLM_PLUGINS= (empty)")


def __getattr__(name: str) -> Any:
    """`CUSTOM` is one name of vLLM's for attention and MLA: which of the two, the model says."""
    if name != "CUSTOM":
        raise AttributeError(f"module 'polyattn_vllm' has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname

    model = get_current_vllm_config().model_config
    return resolve_obj_by_qualname(MLA if model is not None and model.use_mla else ATTENTION)
