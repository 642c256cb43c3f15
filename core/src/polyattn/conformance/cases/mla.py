"""Which cases follow from the claims of an MLA backend? Pure data."""

from __future__ import annotations

from collections.abc import Iterator

from polyattn.conformance.case import Case, caches, captures
from polyattn.conformance.cases import invariance, sparse
from polyattn.device import Device
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.info import BackendInfo
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES, AttentionKind, GraphCapture
from polyattn.spec.latent import LatentSpec
from polyattn.spec.layer import LayerSpec
from polyattn.spec.sparse import SparseSpec

TOPKS = (24, 128, 2048)
DECODES = ("decode", "padded", "many", "empty")


def derive(info: BackendInfo, device: Device) -> list[Case]:
    """Return the cases of an MLA backend's claims."""
    caps = info.capabilities
    cases = []
    for kind in sorted(caps.kinds, key=lambda k: k.value):
        base = _latent_base(caps, kind)
        batches = [*DECODES]
        if kind is AttentionKind.MLA or "prefill" in caps.phases:
            batches += ["mixed", "prefills first", "chunked", "long", "late padding"]
        if caps.decode_query_lens > 1:
            batches.append("short queries")
            if "non_causal" in caps.features:
                free = base.replace(causal=False)
                cases.append(Case("latent", f"{kind.value} not causal", free, "short queries"))
        cases += [Case("latent", kind.value, base, name) for name in batches]
        for label, spec in _latent_variants(caps, base):
            cases.append(Case("latent", f"{kind.value} {label}", spec, "decode"))
        looked_at = ["latent_plans", "latent_stale", "latent_shared"]
        cases += [Case(name, kind.value, base, "decode") for name in looked_at]
        if kind is AttentionKind.MLA:
            cases.append(Case("latent_absorbed", kind.value, base, "decode"))
        for how in ("numbers", "nan", "inf"):
            cases.append(Case("latent_isolation", f"{kind.value} {how}", base, "decode"))
        if "mixed" in batches:
            cases.append(Case("latent_isolation", f"{kind.value} numbers", base, "mixed"))
        if caps.graph_capture:
            how = "graph" if captures(device) else "reuse"
            for level, name in (("single_token_decode", "decode"), ("uniform", "three each")):
                spec = base.replace(graph_capture=level)
                if spec.graph_capture <= caps.graph_capture:
                    cases.append(Case(how, kind.value, spec, name))
            if caps.graph_capture >= GraphCapture.ANY:
                how = "mixed_graph" if captures(device) else "mixed_reuse"
                spec = base.replace(graph_capture="any")
                cases.append(Case(how, kind.value, spec, "mixed"))
        if kind is min(caps.kinds, key=lambda k: k.value):
            cases += [Case(name, kind.value, base, "tiny") for name in ("many_calls", "process")]
        if "long" in batches:
            cases += [Case("latent", kind.value, base, "many sequences")]
            cases += [Case("latent", kind.value, base, "after context")]
        cases.append(Case("latent_search", kind.value, base, "drawn"))
        cases += invariance.of_others(
            caps, base, kind.value, "mixed" if "mixed" in batches else "decode"
        )
        cases += refusals(caps, base, device, "decode")
    served = [c for c in cases if c.check == "refusal" or not check(caps, c.spec, device, "decode")]
    return served + (sparse.rows(info, device) if AttentionKind.SPARSE_MLA in caps.kinds else [])


def further(caps: Capabilities, base: LayerSpec, device: Device) -> Iterator[LayerSpec]:
    """Yield other layers whose long decodes the case of a long step tests."""
    for heads in caps.gqa_ratios.examples((40, 64)):
        yield base.replace(num_heads=heads, num_kv_heads=heads)
    for topk in caps.topks.examples(TOPKS) if base.sparse else ():
        yield base.replace(sparse=SparseSpec(budget=topk))
    for fields in ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"block_size": 64}):
        spec = base.replace(**fields)
        if not check(caps, spec, device, "decode"):
            yield spec


def _latent_base(caps: Capabilities, kind: AttentionKind) -> LayerSpec:
    rank = caps.latent_ranks.examples((64, 512))[0]
    small = rank < 512
    rope = 16 if small else 64
    choice = None
    if kind is AttentionKind.SPARSE_MLA:
        choice = SparseSpec(budget=caps.topks.examples(TOPKS)[0])
    return LayerSpec(
        kind=kind,
        num_heads=16 if 16 in caps.gqa_ratios else 128,
        head_size=(32 if small else 128) + rope,
        v_head_size=32 if small else 128,
        dtype=next(d for d in ("bfloat16", "float16", "float32") if d in caps.dtypes),
        block_size=caps.preferred_block_size,
        latent=LatentSpec(rank=rank, rope_head_size=rope),
        sparse=choice,
    )


def _latent_variants(caps: Capabilities, base: LayerSpec) -> Iterator[tuple[str, LayerSpec]]:
    for dtype in DTYPES:
        if dtype in caps.dtypes and dtype != base.dtype:
            yield f"dtype {dtype}", base.replace(dtype=dtype)
    for heads in caps.gqa_ratios.examples((1, 5, 128)):
        yield f"heads {heads}", base.replace(num_heads=heads, num_kv_heads=heads)
    if base.latent and 0 in caps.latent_ropes:
        bare = LatentSpec(rank=base.latent.rank, rope_head_size=0)
        yield "no rope key", base.replace(latent=bare)
    if base.latent and base.latent.rank < 512 and 512 in caps.latent_ranks:
        latent = LatentSpec(rank=512, rope_head_size=64)
        wide = base.replace(head_size=192, v_head_size=128, latent=latent)
        yield "rank 512", wide
        for cached in caches(caps, wide):
            if cached not in caches(caps, base):
                yield f"rank 512, {cached}", wide.replace(kv_cache_dtype=cached)
    for cached in caches(caps, base):
        yield f"kv_cache_dtype {cached}", base.replace(kv_cache_dtype=cached)
    for size in caps.block_sizes.examples((1, 16, 32, 64, 128)):
        if size != base.block_size:
            yield f"block_size {size}", base.replace(block_size=size)
    expanded = caps.preferred_block_size * 2
    if expanded not in caps.block_sizes:
        yield f"expanded block_size {expanded}", base.replace(block_size=expanded)
    if "lse" in caps.features:
        yield "lse", base.replace(needs_lse=True)
    if base.sparse:
        most = base.sparse.budget
        yield "physical ids", base.replace(sparse=SparseSpec(budget=most, physical=True))
        groups = SparseSpec(budget=-(-most // 4), granularity=4)
        yield "groups of 4", base.replace(sparse=groups)
    scaled = base.replace(scale=0.135)  # DeepSeek-V3's, with YaRN
    yield "scale", scaled
    if "lse" in caps.features:
        yield "scale lse", scaled.replace(needs_lse=True)


def refusals(caps: Capabilities, base: LayerSpec, device: Device, phase: str) -> Iterator[Case]:
    attempts = {f"{base.kind.value} dtype {d}": base.replace(dtype=d) for d in DTYPES}
    if base.kind.is_latent:
        for cached in KV_CACHE_DTYPES:
            label = f"{base.kind.value} kv_cache_dtype {cached}"
            attempts[label] = base.replace(kv_cache_dtype=cached)
        attempts[f"{base.kind.value} lse"] = base.replace(needs_lse=True)
    for label, spec in attempts.items():
        if check(caps, spec, device, phase):
            yield Case("refusal", label, spec, "none")
