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
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    MLAAttentionSpec,
)

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
        self,
        impl: Any,
        query: Tensor,
        given: tuple[Tensor, Tensor] | None,
        cache: Tensor,
        output: Tensor,
    ) -> None:
        """Run a layer of vLLM's over its cache, or what is `given`; later tokens are padding."""
        layer = self.layers[impl]
        plan = self.plans[layer.group]
        tokens = plan.batch.num_tokens
        key, value = (None, None) if given is None else (t[:tokens] for t in given)
        pages = pages_of(layer, cache) if given is None else None
        layer(query[:tokens], key, value, pages, plan, out=output[:tokens])


@dataclass
class Captured:
    """What a graph of a number of requests, of as many tokens each, reads.

    vLLM's lengths are read where all backends take padding rows without keys. Elsewhere `lens` is, in
    which padding rows read block 0.
    """

    starts: Tensor
    lens: Tensor | None
    plans: dict[LayerGroup, StepPlan]


class Builder(AttentionMetadataBuilder[Step]):
    """Selects at start-up and plans each step. Layers of one spec share a group, no other builder's.

    A captured graph reads the plans of its capture, by number of requests and tokens of each; `build`
    plans into their buffers before each replay.
    """

    reorder_batch_threshold = 1  # decodes come first, so that both phases' rows are views

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return what a graph may hold: steps of as many tokens a request, of MLA one token."""
        if envs.VLLM_BATCH_INVARIANT or current_platform.is_cpu():
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        if isinstance(kv_cache_spec, MLAAttentionSpec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check_engine(vllm_config, device)
        self.captured: dict[tuple[int, int], Captured] = {}
        speculation = vllm_config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        self.longest_captured = 1 + (drafts or 0)
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
            if layer._k_scale.numel() > 1:
                fields["scales"] = "head"
            if getattr(self.kv_cache_spec, "non_causal", False):  # prompts see all of themselves
                fields["causal"] = False
            mode = self.vllm_config.compilation_config.cudagraph_mode
            full = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
            if full and not envs.VLLM_BATCH_INVARIANT:
                uniform = self.longest_captured > 1 and "latent" not in fields
                fields["graph_capture"] = "uniform" if uniform else "single_token_decode"
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
            remedies = [
                f"vLLM chose the layout {layout}; POLYATTN_LAYOUT={other} makes it choose {other}"
                for other in ("NHD", "HND")
                if spec.cached and spec.latent is None and other != layout
            ]
            if spec.graph_capture:
                remedies.append(
                    "without full CUDA graphs others may serve: --compilation-config "
                    '\'{"cudagraph_mode": "PIECEWISE"}\''
                )
            raise SelectionError("\n".join([str(error), *remedies])) from error

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
        captured = self.captured.get(_uniform(common))
        if captured is not None:  # a graph runs what is padding, too, which comes last
            return self._replayed(common, lens[: sum(b > a for a, b in pairwise(starts))], captured)
        own_lens, table = common.seq_lens, self._table(common)
        batch = Batch.on_buffers(starts, lens, common.query_start_loc, own_lens, table, None)
        return self._plan(common, batch, {})

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        """Plan for the longest sequences that there can be, so that no later step needs more."""
        common = common_attn_metadata
        rows, each = _uniform(common)
        if not 1 <= each <= self.longest_captured:
            return self.build(0, common)
        if (rows, each) not in self.captured:
            starts = torch.arange(0, rows * each + 1, each, dtype=torch.int32, device=self.device)
            pads = each == 1 or all(group.planner.padding_rows for group in self.groups.values())
            self.captured[rows, each] = Captured(starts, None if pads else starts[1:].clone(), {})
        captured = self.captured[rows, each]
        longest = self.vllm_config.model_config.max_model_len
        step = self._replayed(common, [longest] * rows, captured)
        captured.plans = captured.plans or step.plans
        return step

    def _replayed(
        self, common: CommonAttentionMetadata, lens: list[int], captured: Captured
    ) -> Step:
        """Plan a step, padding rows and all, into what its graph reads."""
        rows, each = _uniform(common)
        device_lens, padding = common.seq_lens, 0
        if captured.lens is not None:
            device_lens, padding = captured.lens, each
            device_lens[: len(lens)] = common.seq_lens[: len(lens)]
            device_lens[len(lens) :] = padding
        batch = Batch.on_buffers(
            list(range(0, rows * each + 1, each)),
            lens + [padding] * (rows - len(lens)),
            captured.starts,
            device_lens,
            self._table(common),
            None,
        )
        return self._plan(common, batch, captured.plans)

    def _table(self, common: CommonAttentionMetadata) -> Tensor | None:
        cached = any(group.spec.cached for group in self.groups.values())
        return common.block_table_tensor if cached else None

    def _plan(
        self, common: CommonAttentionMetadata, batch: Batch, before: dict[LayerGroup, StepPlan]
    ) -> Step:
        groups = self.groups.values()
        refuse(
            REMEDY,
            causal_of_each_request=isinstance(common.causal, Tensor),
            non_causal_steps=common.causal is False and any(g.spec.causal for g in groups),
            mm_req_doc_ranges=common.mm_req_doc_ranges,
            rswa_prefix_lens=common.rswa_prefix_lens,
            dcp_local_seq_lens=common.dcp_local_seq_lens,
        )
        plans = {group: group.plan(batch, before.get(group)) for group in groups}
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        return Step(plans, self.layers, tokens, common.num_reqs, slots)


def _uniform(common: CommonAttentionMetadata) -> tuple[int, int]:
    """Return a step's requests and the tokens of each, as vLLM pads it; 0 tokens if they differ."""
    rows, each = common.num_reqs, common.max_query_len
    return rows, each if common.num_actual_tokens == rows * each else 0


def _check_engine(config: VllmConfig, device: torch.device) -> None:
    """Raise before the engine is up for what no step can be: on a CPU vLLM asks no backend of it.

    A step is planned by the host's lengths, not by their bounds.
    """
    parallel, model = config.parallel_config, config.model_config
    refuse(
        REMEDY,
        decode_context_parallel_size=parallel.decode_context_parallel_size > 1,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size > 1,
        bidirectional_spans_of_images=model.is_mm_prefix_lm,
        rswa_window=model.rswa_window,
        diffusion_config=config.diffusion_config,
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
