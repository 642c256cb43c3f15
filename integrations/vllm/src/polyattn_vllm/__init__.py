"""vLLM on polyattn: `register` is its plugin, which vLLM calls in each of its processes.

`--attention-backend CUSTOM` selects polyattn, for MLA models too. On a CPU vLLM offers no choice. There
this package replaces CPU_ATTN, CPU_MLA and AMX_MLA wherever it is installed; `VLLM_PLUGINS=` (empty)
disables it.
"""

from __future__ import annotations

from typing import Any

from polyattn.host import integrations

ATTENTION = "polyattn_vllm.attention.PolyattnBackend"
MLA = "polyattn_vllm.mla.PolyattnMLABackend"


def register() -> None:
    """Register polyattn's backends with vLLM."""
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
    """Raise unless the metadata of this distribution names vLLM's version."""
    for integration in integrations():
        if integration.distribution == "polyattn-vllm" and integration.problem:
            raise RuntimeError(f"{integration.problem}; or leave it out: VLLM_PLUGINS= (empty)")


def __getattr__(name: str) -> Any:
    """`CUSTOM`, one name of vLLM's for attention and for MLA. The model decides between them."""
    if name != "CUSTOM":
        raise AttributeError(f"module 'polyattn_vllm' has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname

    model = get_current_vllm_config().model_config
    return resolve_obj_by_qualname(MLA if model is not None and model.use_mla else ATTENTION)
