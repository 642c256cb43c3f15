"""Continuous batching: transformers' paged cache is read and written in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import transformers
from packaging.version import Version
from polyattn import Batch, KVCache, LayerGroup, PolyattnError
from polyattn.host import group_for, plan_lengths, run_plan
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import PagedAttentionCache

from polyattn_transformers.ledger import LEDGER

VERSION = Version(transformers.__version__)


def set_batch_invariant(model: PreTrainedModel, level: bool | str) -> None:
    """Set a model's level of `LayerSpec.batch_invariant`, for its attention on polyattn.

    With `"calls"` a whole sequence without a cache gets the same bits as its tokens in continuous
    batching. Other calls without a paged cache are refused, except calls with gradients, which torch
    serves. The model's other operators stay torch's.
    """
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module._polyattn_invariance = level  # type: ignore[assignment]


def continuous_batching_manager(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    *,
    batch_invariant: bool | str = False,
    **kwargs: Any,
) -> Any:
    """Return a manager as `model.init_continuous_batching` does, with attention by polyattn.

    transformers' own method takes only the attention names that it knows, so the manager is made under
    one of those and the model's name set afterwards. `batch_invariant`: as `set_batch_invariant` sets it.
    Raises `PolyattnError` if CUDA graphs are asked for, because a step's lengths are read on the host. It
    does so too for a model that doesn't pass the cache on, for one with MLA, and before transformers 5.16
    for one with a window.
    """
    config = kwargs.get("continuous_batching_config")
    graphs = getattr(config, "use_cuda_graph", None)
    if any(graphs) if isinstance(graphs, tuple) else graphs:
        raise PolyattnError(
            f"use_cuda_graph={graphs}: continuous batching here plans each step on the host; leave it out"
        )
    host: Any = model
    if not host._supports_attention_backend:
        raise PolyattnError(
            f"{type(model).__name__} doesn't pass a paged cache on to the attention interface; use its "
            "generate()"
        )
    text = host.config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        raise PolyattnError(
            f"continuous batching of {type(model).__name__}, kv_lora_rank={text.kv_lora_rank}: "
            "transformers' paged cache has heads of one size, with any attention; use its generate()"
        )
    types = getattr(text, "layer_types", None) or [
        "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    ]
    if "sliding_attention" in types and Version("5.16") > VERSION:
        raise PolyattnError(
            f"continuous batching of {type(model).__name__}: transformers {VERSION} reads a window's "
            "keys from the wrong places of its cache, with any attention; upgrade it to 5.16 or newer"
        )
    set_batch_invariant(model, batch_invariant)
    host.set_attn_implementation("paged|eager")
    manager = host.init_continuous_batching(generation_config=generation_config, **kwargs)
    host.set_attn_implementation("polyattn")
    if Version("5.24") <= VERSION:
        create = manager._create_batch_processor

        def create_with_our_cache() -> Any:
            processor = create()
            processor.cache.__class__ = LeftToAttention
            return processor

        manager._create_batch_processor = create_with_our_cache
    return manager


class LeftToAttention(PagedAttentionCache):
    """A cache that `attend` stores into; since transformers 5.24 models store before they attend."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        kwargs["cache"] = self
        return key_states, value_states


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Store the step's keys and values and attend. Tensors are packed, (1, heads, tokens, size).

    Full attention reads the cache's own pages. A sliding layer's pages are a ring, and transformers
    puts its keys in order first.
    """
    layer, cache = int(module.layer_idx), _cache(module, kwargs)  # type: ignore[arg-type]
    index, window, pages_now = _layer(cache, layer)
    key_starts = kwargs["cu_seq_lens_k"]
    if isinstance(key_starts, dict):  # up to 5.18 a model of one layer type passes no dictionary
        key_starts = key_starts["full_attention" if window is None else "sliding_attention"]
    lens = [_lens(kwargs["cu_seq_lens_q"]), _lens(key_starts)]
    fields: dict[str, Any] = {
        "num_heads": query.shape[1], "num_kv_heads": key.shape[1], "head_size": query.shape[3],
        "v_head_size": value.shape[3], "scale": float(scaling), "dtype": query.dtype,
        "logit_soft_cap": softcap, "learned_sinks": sinks is not None,
        "batch_invariant": getattr(module, "_polyattn_invariance", False),
    }  # fmt: skip
    flat = query[0].transpose(0, 1)
    tokens = sum(lens[0])
    read_index, write_index = kwargs["read_index"][index], kwargs["write_index"][index]
    if window is None and read_index.numel():
        step_key = key[0].transpose(0, 1)[:tokens], value[0].transpose(0, 1)[:tokens]
        pages = KVCache(*pages_now())
        group = group_for(query.device, **fields, block_size=pages.block_size)
        batch = _batch(group, lens, read_index, write_index, pages)
        out = run_plan(group.plan_for(batch), flat[:tokens], *step_key, pages, sinks=sinks)[0]
    else:
        level = fields["batch_invariant"]
        if window is not None and level not in (False, True, "batch"):
            raise PolyattnError(
                f"batch_invariant={level!r}: layer {layer} has a window of {window}, whose keys "
                "transformers moves from step to step; use batch_invariant='batch'"
            )
        indices = (
            [kwargs["read_index"], kwargs["write_index"]] if _NAMES_INDICES else [dict(kwargs)]
        )
        keys, values = PagedAttentionCache.update(cache, key, value, layer, *indices)
        group = group_for(query.device, **fields, sliding_window=window, cached=False)
        step = plan_lengths(group, tuple(lens[0]), tuple(lens[1]))
        whole = keys, values
        if keys.dim() == 4:  # since transformers 5.19
            whole = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        out = run_plan(step, flat[:tokens], *whole, sinks=sinks)[0]
    LEDGER.count(group)
    if tokens < flat.shape[0]:  # padding, whose output is free
        out = torch.cat([out, out.new_zeros(flat.shape[0] - tokens, *out.shape[1:])])
    return out[None]


_NAMES_INDICES = "read_index" in inspect.signature(PagedAttentionCache.update).parameters
"""Whether the cache takes only a step's indices, as up to transformers 5.18."""


def _cache(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Return a step's cache. Raises `PolyattnError` where the model has stored in it already."""
    cache = kwargs.get("cache")
    if cache is None:  # the keys are the whole cache's, and no mask separates the requests
        raise PolyattnError(
            f"continuous batching of {type(module).__name__} was not begun by "
            "polyattn_transformers.continuous_batching_manager; begin it so"
        )
    return cache


def _layer(cache: Any, layer: int) -> tuple[int, int | None, Callable[[], tuple[Tensor, Tensor]]]:
    """Return which of a step's indices is a layer's, its window, and what returns its pages."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer]
        window = getattr(allocator, "sliding_window", None)
        return allocator.index, window, lambda: allocator.get_cache_for_block_table(layer)
    # transformers 5.10 to 5.17: layers with the same index in their groups share a tensor of tokens.
    index, place = cache.layer_index_to_group_indices[layer]
    window = getattr(cache.group_cache_managers[index], "sliding_window", None)
    pages = (-1, cache.block_size)
    return index, window, lambda: (
        cache.key_cache[place].unflatten(0, pages), cache.value_cache[place].unflatten(0, pages)
    )  # fmt: skip


def _lens(starts: Tensor) -> list[int]:
    """Return the lengths between cumulative ones, copied to the host once a step."""
    known = getattr(starts, "_polyattn_lens", None)
    if known is None:
        known = starts.diff().tolist()
        starts._polyattn_lens = known  # type: ignore[attr-defined]
    return known


def _batch(
    group: LayerGroup,
    lens: list[list[int]],
    read_index: Tensor,
    write_index: Tensor,
    cache: KVCache,
) -> Batch:
    """Return the step as a batch over pages, remembered by the step's own index tensor."""
    known: dict[LayerGroup, Batch] = read_index.__dict__.setdefault("_polyattn_batches", {})
    batch = known.get(group)
    if batch is None:
        query_lens, key_lens = lens
        assert group.cache_format is not None
        page = group.cache_format.block_size
        width = max((-(-n // page) for n in key_lens), default=0)
        at, index = 0, torch.zeros(len(key_lens), width, dtype=torch.int64, device="cpu")
        for row, length in enumerate(key_lens):
            blocks = -(-length // page)
            index[row, :blocks] = at + torch.arange(blocks, device="cpu") * page
            at += length
        table = (read_index[index.clamp_(max=max(0, at - 1)).to(read_index.device)] // page).int()
        starts = [0, *accumulate(query_lens)]
        slots = write_index[: starts[-1]]
        batch = known[group] = Batch(starts, key_lens, table, slots)
        group.check_format(cache.format)
    return batch
