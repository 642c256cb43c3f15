"""Which package gives a kernel here? Looks at metadata and folders; imports no library."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_library(name: str) -> Path | None:
    """Return the shared library `name` of an installed vLLM, without importing vLLM."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for place in (Path(folder), Path(folder) / "vllm_flash_attn"):
            path = place / f"{name}.abi3.so"
            if path.is_file():
                return path
    return None


@cache
def fa2_provider() -> str | None:
    """Return `"flash_attn"`, `"vllm"`, `"torch"` or None.

    flash-attn 4 installs a `flash_attn` namespace too, so the distribution is asked, not the module.
    """
    if _version("flash-attn"):
        return "flash_attn"
    if vllm_library("_vllm_fa2_C"):
        return "vllm"
    torch = _version("torch") or "0"
    numbers = [int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit()]
    return "torch" if numbers >= [2, 13] else None


@cache
def fa3_provider() -> str | None:
    """Return `"flash_attn_interface"`, `"vllm"` or None."""
    if find_spec("flash_attn_interface"):
        return "flash_attn_interface"
    return "vllm" if vllm_library("_vllm_fa3_C") else None


def fa2_ready() -> str | None:
    """Say why FlashAttention-2 isn't here, or None."""
    if fa2_provider():
        return None
    return "none of flash-attn, vllm and a torch of 2.13 or later (paged varlen_attn) is installed"


def fa3_ready() -> str | None:
    """Say why FlashAttention-3 isn't here, or None."""
    return None if fa3_provider() else "neither flash_attn_interface nor vllm is installed"


def fa4_ready() -> str | None:
    """Say why FlashAttention-4 isn't here, or None."""
    if find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed; pip install nvidia-cutlass-dsl"
    return None


@cache
def flashmla_provider() -> str | None:
    """Return `"flash_mla"`, `"vllm"` or None."""
    if find_spec("flash_mla"):
        return "flash_mla"
    return "vllm" if vllm_library("_flashmla_C") else None


def flashmla_ready() -> str | None:
    """Say why FlashMLA isn't here, or None."""
    return None if flashmla_provider() else "neither flash_mla nor vllm is installed"


def fla_ready() -> str | None:
    """Say why flash-linear-attention isn't here, or None."""
    return (
        None if find_spec("triton") else "triton is not installed; fla's kernels are written in it"
    )


def flashinfer_ready() -> str | None:
    """Say why FlashInfer can't build its kernels here, or None: it compiles them on first use."""
    if _version("apache-tvm-ffi") is None:
        return "apache-tvm-ffi is not installed; pip install apache-tvm-ffi"
    if _version("flashinfer-jit-cache") or _version("flashinfer-cubin"):
        return None
    cuda_home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if not (shutil.which("nvcc") or (Path(cuda_home) / "bin" / "nvcc").exists()):
        return "its kernels are compiled on first use and nvcc is not found; set CUDA_HOME"
    if not shutil.which("ninja"):
        return "its kernels are compiled on first use and ninja is not found; pip install ninja"
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    if not os.access(folder, os.W_OK):
        return f"its cache under {folder} can't be written; set FLASHINFER_WORKSPACE_BASE"
    return None


def cudnn_ready() -> str | None:
    """Say why cuDNN isn't here, or None."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        if _version(name):
            return None
    return "torch's cuDNN (nvidia-cudnn-cu12 or -cu13) is not installed"


def xformers_ready() -> str | None:
    """Say why xFormers can't be imported here, or None."""
    if find_spec("flash_attn") and not _version("flash-attn"):
        return (
            "xformers imports flash_attn.flash_attn_interface where it sees a flash_attn folder, and "
            "flash-attn 4's has none; uninstall flash-attn-4 or install flash-attn"
        )
    return None
