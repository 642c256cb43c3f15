"""What does vLLM build once a step? One plan for each group of layers that compute the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from polyattn import Batch, KVCache, LayerGroup, LayerSpec, StepPlan, select
from polyattn.errors import SelectionError
from polyattn.host import current_settings, joined_pages, refuse
from torch import Tensor
from vllm import envs
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, EncoderOnlyAttentionSpec

from polyattn_vllm.layouts import layout_of

log = init_logger("vllm.polyattn")

REMEDY = "choose another --attention-backend, or set VLLM_PLUGINS= (empty)"


@dataclass
class Step(AttentionMetadata):
    """A step's plans, by group, and polyattn's layers of the builder that made them, by vLLM's.

    The counts are what vLLM's MLA layer asks: it gives what is no decode to `forward_mha`.
    """

    plans: dict[LayerGroup, StepPlan]
    layers: dict[Any, Any]
    num_actual_tokens: int
    num_prefills: int
    slot_mapping: Tensor
    num_decodes: int = 0
    num_decode_tokens: int = 0

    def attend(
        self, impl: Any, query: Tensor, given: tuple[Tensor, Tensor] | None, cache: Tensor,
        output: Tensor,
    ) -> None:  # fmt: skip
        """Run a layer of vLLM's over its cache, or what is `given`; later tokens are padding."""
        layer = self.layers[impl]
        plan = self.plans[layer.group]
        tokens = plan.batch.num_tokens
        key, value = (None, None) if given is None else (t[:tokens] for t in given)
        pages = pages_of(layer, cache) if given is None else None
        layer(query[:tokens], key, value, pages, plan, out=output[:tokens])


class Builder(AttentionMetadataBuilder[Step]):
    """Selects at start-up and plans each step. Layers of one spec share a group, no other builder's.

    A captured graph of one token a request reads the plans of its capture, by number of requests;
    `build` plans into their buffers before each replay.
    """

    reorder_batch_threshold = 1  # decodes come first, so that both phases' rows are views

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return what a graph may hold: steps of one token a request, where there are graphs."""
        if envs.VLLM_BATCH_INVARIANT or current_platform.is_cpu():
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig,
        device: torch.device,
    ):  # fmt: skip
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check_engine(vllm_config, device)
        self.captured: dict[int, dict[LayerGroup, StepPlan]] = {}
        self.groups: dict[LayerSpec, LayerGroup] = {}
        self.layers: dict[Any, Any] = {}
        self._attach()

    def _attach(self) -> None:
        """Attach the layers that `layer_names` has and `layers` doesn't.

        A draft model's proposer gives its builder one layer, and adds the others to that list later.
        """
        known = self.vllm_config.compilation_config.static_forward_context
        layers = [known[name] for name in self.layer_names[len(self.layers) :]]
        specs = [self._spec(layer) for layer in layers]
        for layer, spec in zip(layers, specs, strict=True):
            if spec not in self.groups:
                self.groups[spec] = self._group(spec)
            self.layers[layer.impl] = layer.impl.attach(layer, self.groups[spec])
        for spec, count in Counter(specs).items():
            chosen = self.groups[spec].selection.explain()
            log.info("polyattn serves %d layers:\n%s", count, chosen)

    def _spec(self, layer: Any) -> LayerSpec:
        dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
        fields: dict[str, Any] = {"v_head_size": getattr(layer, "head_size_v", 0), "dtype": dtype}
        fields |= layer.impl.fields
        cached = fields.get("cached", True)
        if (
            envs.VLLM_BATCH_INVARIANT
        ):  # the other requests decide how a prompt is divided into steps
            fields["batch_invariant"] = "steps" if cached else "batch"
        if cached:
            stored = layer.impl.kv_cache_dtype
            fields["kv_cache_dtype"] = {"fp8": "fp8_e4m3", dtype: "auto"}.get(stored, stored)
            fields["block_size"] = self.kv_cache_spec.block_size
            mode = self.vllm_config.compilation_config.cudagraph_mode
            full = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
            if full and not envs.VLLM_BATCH_INVARIANT:
                fields["graph_capture"] = "single_token_decode"
        return LayerSpec(**fields)

    def _group(self, spec: LayerSpec) -> LayerGroup:
        """Select for the layout that vLLM settled on; an accelerator's kernels are verified."""
        layout = layout_of(self.vllm_config.cache_config)
        if spec.latent is not None:
            layout = "NHD"  # of one head, both are
        ours = replace(current_settings(), layout=layout)
        verify = self.device.type != "cpu" if ours.verify is None else ours.verify
        try:
            return LayerGroup(select(spec, self.device, settings=ours, verify=verify))
        except SelectionError as error:
            if not spec.graph_capture:
                raise
            raise SelectionError(
                f"{error}\nwithout full CUDA graphs others may serve: --compilation-config "
                '\'{"cudagraph_mode": "PIECEWISE"}\''
            ) from error

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        """Plan a step by the host's lengths; kernels read the device's."""
        if len(self.layers) < len(self.layer_names):
            self._attach()
        common = common_attn_metadata
        cpu = self.device.type == "cpu"
        seq_lens = common.seq_lens if cpu else common.seq_lens_cpu_upper_bound
        assert seq_lens is not None
        starts, lens = common.query_start_loc_cpu.tolist(), seq_lens.tolist()
        captured = self.captured.get(common.num_reqs, {}) if _one_each(common) else {}
        if captured:  # a graph runs what is padding, too: rows of one token, and no keys
            lens = [n if b > a else 0 for n, (a, b) in zip(lens, pairwise(starts), strict=True)]
            starts = list(range(common.num_reqs + 1))
        return self._plan(common, starts, lens, captured)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        """Plan for the longest sequences that there can be, so that no later step needs more."""
        common = common_attn_metadata
        if not _one_each(common):
            return self.build(0, common)
        count, longest = common.num_reqs, self.vllm_config.model_config.max_model_len
        starts, before = list(range(count + 1)), self.captured.get(count, {})
        step = self._plan(common, starts, [longest] * count, before)
        self.captured.setdefault(count, step.plans)
        return step

    def _plan(
        self, common: CommonAttentionMetadata, starts: list[int], lens: list[int],
        captured: dict[LayerGroup, StepPlan],
    ) -> Step:  # fmt: skip
        refuse(
            REMEDY,
            causal_of_each_request=isinstance(common.causal, Tensor),
            mm_req_doc_ranges=common.mm_req_doc_ranges,
            rswa_prefix_lens=common.rswa_prefix_lens,
            dcp_local_seq_lens=common.dcp_local_seq_lens,
        )
        groups = self.groups.values()
        table = common.block_table_tensor if any(g.spec.cached for g in groups) else None
        batch = Batch.on_buffers(starts, lens, common.query_start_loc, common.seq_lens, table, None)
        plans = {group: group.plan(batch, captured.get(group)) for group in groups}
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        return Step(plans, self.layers, tokens, common.num_reqs, slots)


def _one_each(common: CommonAttentionMetadata) -> bool:
    """Whether a step has a query token for each request, as vLLM pads it: what a graph may replay."""
    return bool(common.max_query_len == 1 and common.num_actual_tokens == common.num_reqs)


def _check_engine(config: VllmConfig, device: torch.device) -> None:
    """Raise before the engine is up for what no step can be: on a CPU vLLM asks no backend of it.

    A step is planned by the host's lengths, not by their bounds.
    """
    shards = config.parallel_config.decode_context_parallel_size
    refuse(
        REMEDY,
        decode_context_parallel_size=shards if shards > 1 else None,
        bidirectional_spans_of_images=config.model_config.is_mm_prefix_lm or None,
    )
    speculates = config.speculative_config is not None
    if speculates and config.scheduler_config.async_scheduling and device.type != "cpu":
        raise NotImplementedError(
            "polyattn plans by the host's lengths, and asynchronous scheduling with speculative "
            f"decoding has only their bounds; pass --no-async-scheduling, {REMEDY}"
        )


def pages_of(layer: Any, storage: Tensor) -> KVCache:
    """View vLLM's cache of a layer: (blocks, heads, tokens, K and V), MLA's (blocks, tokens, latent)."""
    return joined_pages(storage, layer.group.cache_format, heads_first=True)
