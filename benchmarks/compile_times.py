"""What does a group with functions of its own compile on an H200, and what does each kernel cost?

Needs no GPU: the device is pretended, and kernels are compiled down to machine code one after another,
into an empty cache. Seconds are the processor's, of this process and of ptxas.

`python benchmarks/compile_times.py '{"variant": "flash_sigmoid"}' [--out FILE]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="compile_times_")

import triton
from polyattn import LayerSpec, register_variant
from polyattn.selection.cache_format import CacheFormat
from polyattn_triton import launch, planning
from polyattn_triton.attention import TritonAttention
from polyattn_triton.compiling import warm_up
from polyattn_triton.hopper import choice as hopper
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import compiler
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "families"))
MULTIPROCESSORS, SHARED_MEMORY, L2 = 132, 233472, 60 << 20
"""An H200's."""
STAGES = ("make_ttir", "make_ttgir", "gluon_to_ttgir", "make_llir", "make_ptx", "make_cubin")
KERNELS: list[dict[str, Any]] = []


def spent() -> float:
    return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def measured(function: Any, stage: str) -> Any:
    def run(*args: Any, **words: Any) -> Any:
        if stage == "python":
            KERNELS.append({"kernel": args[0].fn.__name__})
        began = spent()
        found = function(*args, **words)
        KERNELS[-1][stage] = round(spent() - began, 2)
        return found

    return run


def pretend() -> None:
    """Have Triton and the plugin find an H200, and Triton's stages say what they cost."""
    plans: Any = planning
    warms: Any = warm_up
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(driver)
    plans.multiprocessors = lambda device: MULTIPROCESSORS
    plans.fitting = lambda device, needed, most: max(1, min(most, SHARED_MEMORY // (needed + 1024)))

    def own(spec: Any, arch: str, device: Any, generated: Any = None) -> Any:
        config = hopper.hopper_config(spec, arch, generated)
        if config is None:
            return None
        return hopper.HopperPrefill(spec, config, MULTIPROCESSORS, int(0.7 * L2), generated)

    plans.hopper_prefill = own
    for stage in STAGES:
        function = getattr(CUDABackend, stage)
        wrapped = measured(function, stage)
        alone = isinstance(CUDABackend.__dict__[stage], staticmethod)
        setattr(CUDABackend, stage, staticmethod(wrapped) if alone else wrapped)
    for source in (compiler.ASTSource, GluonASTSource):
        if "make_ir" in source.__dict__:
            source.make_ir = measured(source.make_ir, "python")

    @contextlib.contextmanager
    def serial(compilers: Any) -> Any:
        asked: list[Any] = []
        token = launch._compiling.set(asked)
        try:
            yield asked
        finally:
            launch._compiling.reset(token)

    warms.compiling_only = serial


def register() -> None:
    with contextlib.suppress(ImportError):
        from test_variants import VARIANTS  # type: ignore[import-not-found, unused-ignore]

        for variant in VARIANTS:
            register_variant(variant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fields")
    parser.add_argument("--out")
    parser.add_argument("--phases", nargs="*", default=["prefill", "decode"])
    args = parser.parse_args()
    register()
    pretend()
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
    spec = spec.replace(**json.loads(args.fields))
    form = CacheFormat(
        block_size=16, num_kv_heads=8, head_size=128, v_head_size=128, dtype="bfloat16"
    )
    began = spent()
    device: Any = SimpleNamespace(arch="sm_90", torch_device="cpu")
    backend = TritonAttention(spec, form, device)
    print(f"{args.fields}: the object {spent() - began:.2f} s")
    launch_site = launch.Site.__call__

    def named(site: Any, *given: Any, **words: Any) -> None:
        before = len(KERNELS)
        launch_site(site, *given, **words)
        if len(KERNELS) > before:
            names = site.kernel.arg_names[-len(site.constants) :]
            told = dict(zip(names, site.constants, strict=True))
            KERNELS[-1]["of"] = told | site.options

    launch.Site.__call__ = named  # type: ignore
    began = spent()
    warm_up.warm_up(backend, tuple(args.phases))
    whole = spent() - began
    for row in KERNELS:
        times = {k: v for k, v in row.items() if isinstance(v, float)}
        of = row.get("of", {})
        keep = ("SPLIT", "FEW", "LISTED", "PAGED", "BLOCK_M", "HEIGHT", "ROWS", "AT_ONCE",
                "BY_TOKEN", "num_warps", "num_stages", "CAUSAL", "WAY", "FUNCTIONS")  # fmt: skip
        said = " ".join(f"{k}={int(of[k])}" for k in keep if k in of)
        row["total"] = round(sum(times.values()), 2)
        print(
            f"{row['kernel']:24} {row['total']:6.2f}  "
            + " ".join(f"{k.removeprefix('make_')} {v:.2f}" for k, v in times.items()),
            said,
        )
    print(f"{len(KERNELS)} kernels, {whole:.1f} s of the processor")
    if args.out:
        Path(args.out).write_text(json.dumps(KERNELS, default=str, indent=1))


if __name__ == "__main__":
    main()
