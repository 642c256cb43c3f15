"""Builds vLLM's metadata once a step: one plan for each group of layers that compute the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from polyattn import Batch, KVCache, LayerGroup, LayerSpec, Selection, StepPlan, StepSize, select
from polyattn.errors import SelectionError
from polyattn.host import MixedBuffers, current_settings, joined_pages, refuse
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
    """A step's plans, by group, and the polyattn layer of each of vLLM's layers.

    vLLM's MLA layer reads the counts, and passes tokens that aren't decodes to `forward_mha`. Without
    `prefill` it quantises outputs itself afterwards.
    """

    plans: dict[LayerGroup, StepPlan]
    layers: dict[Any, Any]
    num_actual_tokens: int
    num_prefills: int
    slot_mapping: Tensor
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: None = None

    def attend(
        self,
        impl: Any,
        query: Tensor,
        own_keys: tuple[Tensor, Tensor] | None,
        cache: Tensor,
        output: Tensor,
    ) -> None:
        """Run a layer of vLLM's over its cache, or over keys of its own. Later tokens are padding."""
        layer = self.layers[impl]
        plan = self.plans[layer.group]
        tokens = plan.batch.num_tokens
        key, value = (None, None) if own_keys is None else (first(t, tokens) for t in own_keys)
        pages = pages_of(layer, cache) if own_keys is None else None
        # `forward` skips the hooks of `Module.__call__`: no other code can hook this layer.
        layer.forward(first(query, tokens), key, value, pages, plan, out=first(output, tokens))


@dataclass
class Captured:
    """The buffers of a graph with a fixed number of requests, each of `query_len` tokens.

    The graph reads vLLM's lengths if all backends take padding rows without keys. Otherwise it reads
    `lens`, with which padding rows read block 0.
    """

    query_len: int
    starts: Tensor
    lens: Tensor | None
    plans: dict[LayerGroup, StepPlan]


@dataclass
class CapturedMixed:
    """The buffers of a graph of prompts and decodes: core's buffers, in which all rows are prompts."""

    buffers: MixedBuffers
    plans: dict[LayerGroup, StepPlan]


class Builder(AttentionMetadataBuilder[Step]):
    """Selects at start-up and plans each step. Layers of one spec share a group within a builder.

    A captured graph reads the plans of its capture, by number of requests and of tokens. `build` plans
    into their buffers before each replay.
    """

    reorder_batch_threshold = 1  # decodes come first, so that both phases' rows are views

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        """Return what a graph may hold: steps of as many tokens a request.

        With `FULL`, any step, if backends for it serve all layers. With batch invariance, single tokens
        under the same condition.
        """
        if current_platform.is_cpu() or isinstance(kv_cache_spec, EncoderOnlyAttentionSpec):
            return AttentionCGSupport.NEVER
        if envs.VLLM_BATCH_INVARIANT:
            single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            serves = _serves(vllm_config, kv_cache_spec, single)
            return single if serves else AttentionCGSupport.NEVER
        if _mixes(vllm_config) and _serves(vllm_config, kv_cache_spec, AttentionCGSupport.ALWAYS):
            return AttentionCGSupport.ALWAYS
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
        self.captured: dict[tuple[int, int], Captured | CapturedMixed] = {}
        self.support = self.get_cudagraph_support(vllm_config, kv_cache_spec)
        single = self.support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        self.longest_captured = 1 if single else 1 + _drafts(vllm_config)
        self.groups: dict[LayerSpec, LayerGroup] = {}
        self.layers: dict[Any, Any] = {}
        self._attach()

    def _attach(self) -> None:
        """Attach the layers of `layer_names` that aren't in `layers` yet.

        A draft model's proposer gives its builder one layer, and adds the others to that list later.
        """
        known = self.vllm_config.compilation_config.static_forward_context
        layers = [known[name] for name in self.layer_names[len(self.layers) :]]
        specs = [
            layer_spec(layer, self.vllm_config, self.kv_cache_spec, self.support)
            for layer in layers
        ]
        for layer, spec in zip(layers, specs, strict=True):
            if spec not in self.groups:
                self.groups[spec] = self._group(spec)
            self.layers[layer.impl] = layer.impl.attach(layer, self.groups[spec])
        for spec, count in Counter(specs).items():
            chosen = self.groups[spec].selection.explain()
            log.info("polyattn serves %d layers:\n%s", count, chosen)

    def _group(self, spec: LayerSpec) -> LayerGroup:
        """Select; an accelerator's kernels are verified."""
        ours = current_settings().verify
        verify = self.device.type != "cpu" if ours is None else ours
        try:
            return LayerGroup(selected(spec, self.vllm_config, self.device, verify))
        except SelectionError as error:
            layout = layout_of(self.vllm_config.cache_config)
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
        starts, lens = self._lengths(common)
        captured = self.captured.get((common.num_reqs, common.num_actual_tokens))
        if isinstance(captured, CapturedMixed):
            return self._refilled(common, starts, lens, captured)
        if captured is not None and captured.query_len == common.max_query_len:
            # A graph runs padding too, which comes last.
            return self._replayed(common, lens[: sum(b > a for a, b in pairwise(starts))], captured)
        own_lens, table = common.seq_lens, self._table(common)
        # A drafter's lengths may be shorter than the host's. Without graphs nothing depends on them.
        exact = not _drafts(self.vllm_config) and all(
            g.spec.graph_capture for g in self.groups.values()
        )
        batch = Batch.on_buffers(
            starts, lens, common.query_start_loc, own_lens, table, None, exact=exact
        )
        return self._plan(common, batch, {})

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Step:
        """Plan for the longest possible sequences, so that no later step needs larger buffers."""
        common = common_attn_metadata
        rows, tokens, each = common.num_reqs, common.num_actual_tokens, common.max_query_len
        if self.support is AttentionCGSupport.ALWAYS and _mixes(self.vllm_config):
            return self._mixed(common)
        if not 1 <= each <= self.longest_captured or rows * each != tokens:
            return self.build(0, common)
        captured = self.captured.get((rows, tokens))
        if not isinstance(captured, Captured):
            starts = torch.arange(0, tokens + 1, each, dtype=torch.int32, device=self.device)
            pads = each == 1 or all(group.planner.padding_rows for group in self.groups.values())
            captured = Captured(each, starts, None if pads else starts[1:].clone(), {})
            self.captured[rows, tokens] = captured
        longest = self.vllm_config.model_config.max_model_len
        step = self._replayed(common, [longest] * rows, captured)
        captured.plans = captured.plans or step.plans
        return step

    def _mixed(self, common: CommonAttentionMetadata) -> Step:
        """Plan one prompt of all tokens, then vLLM's dummy step into the same buffers."""
        key = common.num_reqs, common.num_actual_tokens
        captured = self.captured.get(key)
        if not isinstance(captured, CapturedMixed):
            buffers = MixedBuffers(
                StepSize(rows=0, prompts=key[0], prompt_tokens=key[1]),
                self.vllm_config.model_config.max_model_len,
                self.kv_cache_spec.block_size,
                self.device,
            )
            step = self._plan(common, buffers.longest(), {})
            captured = self.captured[key] = CapturedMixed(buffers, step.plans)
        self._refilled(common, *self._lengths(common), captured)
        return self._step(common, captured.plans)

    def _refilled(
        self,
        common: CommonAttentionMetadata,
        starts: list[int],
        lens: list[int],
        captured: CapturedMixed,
    ) -> Step:
        """Plan a step into its graph's buffers. One more row takes the padding tokens."""
        rows, longest = sum(b > a for a, b in pairwise(starts)), captured.buffers.max_len
        table = self._table(common)
        assert table is not None
        batch = Batch.on_buffers(
            starts[: rows + 1],
            [min(n, longest) for n in lens[:rows]],  # lengths of a dummy step may be longer
            common.query_start_loc[: rows + 1],
            common.seq_lens[:rows],
            table[:rows],
            None,
        )
        return self._plan(common, captured.buffers.fill(batch), captured.plans)

    def _replayed(
        self, common: CommonAttentionMetadata, lens: list[int], captured: Captured
    ) -> Step:
        """Plan a step with its padding rows into its graph's buffers."""
        rows, each = common.num_reqs, captured.query_len
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

    def _lengths(self, common: CommonAttentionMetadata) -> tuple[list[int], list[int]]:
        """Return on the host where rows' queries start, and the rows' lengths."""
        starts = common.query_start_loc_cpu.tolist()
        if self.device.type == "cpu":
            return starts, common.seq_lens.tolist()
        bounds = common.seq_lens_cpu_upper_bound
        if bounds is None:  # as drafters of 0.24 do
            raise NotImplementedError(
                "polyattn plans by the host's lengths, and vLLM passes none for this step "
                f"(seq_lens_cpu_upper_bound is None); leave out speculative decoding, or {REMEDY}"
            )
        lens = bounds.tolist()
        # A draft model's step has a few tokens more than the target's. vLLM adds them to the device's
        # lengths and to the longest one, and not to the host's (`extend_all_queries_by_N`).
        more = common.max_seq_len - max(lens, default=0)
        if 0 < more <= _drafts(self.vllm_config):
            lens = [length and length + more for length in lens]
        return starts, lens

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
        return self._step(common, {group: group.plan(batch, before.get(group)) for group in groups})

    def _step(self, common: CommonAttentionMetadata, plans: dict[LayerGroup, StepPlan]) -> Step:
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        return Step(plans, self.layers, tokens, common.num_reqs, slots)


def layer_spec(
    layer: Any, config: VllmConfig, kv_cache_spec: Any, support: AttentionCGSupport
) -> LayerSpec:
    """Return what a layer of vLLM's computes; `support`: what a graph may hold."""
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    fields: dict[str, Any] = {"v_head_size": getattr(layer, "head_size_v", 0), "dtype": dtype}
    fields |= layer.impl.fields
    cached = fields.get("cached", True)
    if envs.VLLM_BATCH_INVARIANT:  # other requests decide a prompt's chunks
        fields["batch_invariant"] = "steps" if cached else "batch"
    if cached:
        stored = layer.impl.kv_cache_dtype
        fields["kv_cache_dtype"] = {"fp8": "fp8_e4m3", dtype: "auto"}.get(stored, stored)
        fields["block_size"] = kv_cache_spec.block_size
        if layer._k_scale.numel() > 1:
            fields["scales"] = "head"
        if getattr(kv_cache_spec, "non_causal", False):  # prompts see all of themselves
            fields["causal"] = False
        mode = config.compilation_config.cudagraph_mode
        full = mode is not None and mode.decode_mode() == CUDAGraphMode.FULL
        if full and support is not AttentionCGSupport.NEVER:
            fields["graph_capture"] = "single_token_decode"
            if support is AttentionCGSupport.UNIFORM_BATCH and _drafts(config):
                fields["graph_capture"] = "uniform"
            if support is AttentionCGSupport.ALWAYS:
                fields["graph_capture"] = "any"
    return LayerSpec(**fields)


def selected(spec: LayerSpec, config: VllmConfig, device: torch.device, verify: bool) -> Selection:
    """Select for the layout that vLLM chose. Raises `SelectionError`."""
    layout = layout_of(config.cache_config)
    if spec.latent is not None:
        layout = "NHD"  # with one head both layouts are the same
    return select(spec, device, settings=replace(current_settings(), layout=layout), verify=verify)


def _drafts(config: VllmConfig) -> int:
    """Return how many tokens a step drafts for each request, 0 without speculation."""
    speculation = config.speculative_config
    return (speculation.num_speculative_tokens or 0) if speculation is not None else 0


def _mixes(config: VllmConfig) -> bool:
    """Return whether vLLM's graphs capture mixed steps of prompts and decodes."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL


def _serves(config: VllmConfig, kv_cache_spec: Any, support: AttentionCGSupport) -> bool:
    """Return whether each layer has a backend that a graph of such steps can capture.

    A captured prompt may be as long as the graph, and no longer than a model's sequences.
    """
    most = config.compilation_config.max_cudagraph_capture_size
    longest = config.model_config.max_model_len
    if support is AttentionCGSupport.ALWAYS and most > longest:
        return False
    layers = config.compilation_config.static_forward_context.values()
    ours = [each for each in layers if hasattr(getattr(each, "impl", None), "fields")]
    device = config.device_config.device
    try:
        for spec in {layer_spec(each, config, kv_cache_spec, support) for each in ours}:
            if not spec.cached:
                return False
            selected(spec, config, device, verify=False)
    except SelectionError:
        return False
    return bool(ours)


def _check_engine(config: VllmConfig, device: torch.device) -> None:
    """Raise at start-up for configurations that no step can serve. On a CPU vLLM asks no backend.

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
        use_non_causal=config.attention_config.use_non_causal,
    )
    speculates = config.speculative_config is not None
    if speculates and config.scheduler_config.async_scheduling and device.type != "cpu":
        raise NotImplementedError(
            "polyattn plans by the host's lengths, and asynchronous scheduling with speculative "
            f"decoding has only their bounds; pass --no-async-scheduling, {REMEDY}"
        )


def first(tensor: Tensor, tokens: int) -> Tensor:
    """Return a tensor without the tokens that are padding; most often there are none."""
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


def pages_of(layer: Any, storage: Tensor) -> KVCache:
    """View vLLM's cache of a layer: (blocks, heads, tokens, K and V), MLA's (blocks, tokens, latent)."""
    return joined_pages(storage, layer.group.cache_format, heads_first=True)
