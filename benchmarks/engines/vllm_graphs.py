"""polyattn-vllm's builder under real CUDA graphs, steps and buffers as vLLM's model runner has them.

vLLM itself isn't on the machine: the few names that the integration imports are stood in for.
"""

from __future__ import annotations

import enum
import logging
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from engines import DEVICE, Captured

T = TypeVar("T")
TESTS = Path(__file__).parents[2] / "integrations" / "vllm" / "tests"


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)

    def decode_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.FULL if self.value == (2, 1) else self

    def mixed_mode(self) -> CUDAGraphMode:
        return CUDAGraphMode.PIECEWISE if self.value == (2, 1) else self


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, spec: Any, names: Any, config: Any, device: Any):
        self.kv_cache_spec, self.layer_names = spec, names
        self.vllm_config, self.device = config, device


class AttentionImpl(Generic[T]):
    pass


class Plain:
    @classmethod
    def is_mla(cls) -> bool:
        return False


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    seq_lens_cpu_upper_bound: Tensor | None = None
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None
    dcp_local_seq_lens: Any = None


def stand_in() -> None:
    """Have `import vllm` find the names that the integration asks of it."""

    def module(name: str, **names: Any) -> None:
        found = ModuleType(name)
        found.__dict__.update(names)
        sys.modules[name] = found

    module("vllm", envs=SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    for package in ("vllm.v1", "vllm.v1.attention"):
        module(package)
    module(
        "vllm.config", CUDAGraphMode=CUDAGraphMode, VllmConfig=object,
        get_current_vllm_config_or_none=lambda: None,
    )  # fmt: skip
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.platforms", current_platform=SimpleNamespace(is_cpu=lambda: False))
    module(
        "vllm.v1.attention.backend", AttentionCGSupport=AttentionCGSupport, AttentionMetadata=object,
        AttentionMetadataBuilder=AttentionMetadataBuilder, AttentionBackend=Plain,
        CommonAttentionMetadata=CommonAttentionMetadata, AttentionImpl=AttentionImpl,
        AttentionType=AttentionType, MultipleOf=int, MLAAttentionImpl=AttentionImpl,
    )  # fmt: skip
    module(
        "vllm.v1.kv_cache_interface",
        AttentionSpec=object,
        EncoderOnlyAttentionSpec=type("E", (), {}),
    )
    layouts = enum.Enum("KVCacheLayout", ["LBNHC", "LBHNC"])
    module("vllm.v1.kv_cache_layout", KVCacheLayout=layouts)


@torch.no_grad()
def replayed(
    steps: int = 30, drafts: int = 0, kind: str = "Runner", **layer: Any
) -> dict[str, Any]:
    """Capture two sizes, replay random steps of fewer rows too, and compare with float64.

    `drafts`: tokens that each request has beside its own, as a step that verifies them. `kind`: the
    runner in `steps.py`.
    """
    sys.path.insert(0, str(TESTS))
    import steps as made
    from steps import HEADS, SIZE, random_step

    torch.manual_seed(0)
    graphs = "FULL_AND_PIECEWISE" if DEVICE == "cuda" else "NONE"
    runner = getattr(made, kind)(DEVICE, torch.bfloat16, graphs, drafts=drafts, **layer)
    builder, captured, each = runner.builder, {}, 1 + drafts
    for size in (8, 4):
        empty = torch.zeros(size, 1, dtype=torch.int32)
        first = runner.step([each] * size, size, empty, each)
        # Without graphs a layer goes by its lengths, of which a captured step has bounds.
        cuda = DEVICE == "cuda"
        step = builder.build_for_cudagraph_capture(first) if cuda else builder.build(0, first)
        query = torch.zeros(size * each, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        captured[size] = Captured(partial(runner.attend, query, step)), query
    error, backends = 0.0, next(iter(builder.groups.values())).selection.decision.summary()
    for _ in range(steps):
        rows = int(torch.randint(1, 9, ()))
        size = 4 if rows <= 4 else 8
        lens, table = random_step(rows, each)
        graph, query = captured[size]
        step = builder.build(0, runner.step(lens, size, table, each))
        query.normal_()
        # A CPU's plans have no buffers that a captured one shares.
        out = graph.replay() if DEVICE == "cuda" else runner.attend(query, step)
        wanted = runner.expected(query.cpu(), lens, table, each)
        error = max(error, float((out[: rows * each].cpu().double() - wanted).abs().max()))
    return {"error": error, "steps": steps, "by": str(backends)[:60], "right": error <= 2e-2}


@torch.no_grad()
def mixed(
    rounds: int = 5, dtype: torch.dtype = torch.bfloat16, kind: str = "Runner", **layer: Any
) -> dict[str, Any]:
    """Capture steps of prompts and decodes, as vLLM's `FULL` does, and replay others.

    On a CPU the captured plan is run again: its backend, Triton's interpreter, reads what was planned
    into it.
    """
    sys.path.insert(0, str(TESTS))
    import steps as made
    from steps import HEADS, SIZE, STEPS, random_table

    torch.manual_seed(0)
    runner, captured = getattr(made, kind)(DEVICE, dtype, "FULL", **layer), {}
    builder = runner.builder
    for size in (16, 8, 4):
        step = builder.build_for_cudagraph_capture(runner.made_up(size))
        query = torch.zeros(size, HEADS, SIZE, device=DEVICE, dtype=dtype)
        captured[size] = Captured(partial(runner.attend, query, step)), query
    error, backends = 0.0, next(iter(builder.groups.values())).selection.decision.summary()
    for queries, lens, size in STEPS * rounds:
        graph, query = captured[size]
        table = random_table(len(lens))
        builder.build(0, runner.ragged(queries, lens, min(size, 8), size, table))
        query.normal_()
        out = graph.replay()[: sum(queries)]
        wanted = runner.expected(query.cpu(), lens, table, queries)
        error = max(error, float((out.cpu().double() - wanted).abs().max()))
    claims = builder.support.name == "ALWAYS"
    return {"error": error, "steps": rounds * len(STEPS), "by": str(backends)[:60],
            "claims": claims, "right": claims and error <= 2e-2}  # fmt: skip
