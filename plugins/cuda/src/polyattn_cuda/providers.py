"""Finds the package that provides a kernel. Reads metadata and folders; imports no library."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from polyattn.plugin import find_spec, installed


def _version(package: str) -> str | None:
    version = installed(package)
    return None if version is None else version.version


def _real(module: str) -> bool:
    """Return whether a module is here itself: what has no loader only stands in for it."""
    spec = find_spec(module)
    return spec is not None and spec.loader is not None


def vllm_library(name: str) -> Path | None:
    """Return the shared library `name` of an installed vLLM, without importing vLLM."""
    spec = find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for place in (Path(folder), Path(folder) / "vllm_flash_attn"):
            path = place / f"{name}.abi3.so"
            if path.is_file():
                return path
    return None


def flash_attn_ready() -> str | None:
    """Say why the flash-attn package isn't here, or None.

    flash-attn 4 installs a `flash_attn` namespace too, so the distribution is asked, not the module.
    """
    if not _version("flash-attn"):
        return "flash-attn is not installed"
    return None if _real("flash_attn") else "flash_attn is hidden by a stand-in in this process"


def torch_fa2_ready() -> str | None:
    """Say why torch's own FlashAttention-2 isn't enough here, or None."""
    torch = _version("torch") or "0"
    numbers = [int(part) for part in torch.split("+")[0].split(".")[:2] if part.isdigit()]
    return None if numbers >= [2, 13] else f"torch {torch}'s varlen_attn reads no pages (2.13 does)"


def vllm_fa2_ready() -> str | None:
    """Say why vLLM's build of FlashAttention-2 isn't here, or None."""
    return _vllm_ready("_vllm_fa2_C")


def fa3_ready() -> str | None:
    """Say why flash-attn's hopper folder isn't here, or None."""
    return None if _real("flash_attn_interface") else "flash_attn_interface is not installed"


def vllm_fa3_ready() -> str | None:
    """Say why vLLM's build of FlashAttention-3 isn't here, or None."""
    return _vllm_ready("_vllm_fa3_C")


def flash_mla_ready() -> str | None:
    """Say why the flash_mla package isn't here, or None."""
    return None if find_spec("flash_mla") else "flash_mla is not installed"


def vllm_flashmla_ready() -> str | None:
    """Say why vLLM's build of FlashMLA isn't here, or None."""
    return _vllm_ready("_flashmla_C")


def _vllm_ready(library: str) -> str | None:
    if find_spec("vllm") is None:
        return "vllm is not installed"
    return None if vllm_library(library) else f"the installed vllm has no {library}"


def fa4_ready() -> str | None:
    """Say why FlashAttention-4 isn't here, or None."""
    if find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed; pip install nvidia-cutlass-dsl"
    return None


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
