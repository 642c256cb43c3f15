"""The attention backend. It reads SGLang's token pools as pages, and plans once a forward pass."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from polyattn import Batch, KVCache, LayerGroup, LayerSpec, PolyattnError
from polyattn.host import CallOptions, Ledger, group_for_call, plan_lengths, refuse, run_plan
from torch import Tensor

LEDGER = Ledger("sglang", "nothing")


class Step:
    """One forward pass, as the host knows it, and its batches over the pools."""

    def __init__(self, forward: Any, table: Any):
        mode = forward.forward_mode
        if getattr(forward, "spec_info", None) is not None or not (
            mode.is_decode_or_idle() or mode.name in ("EXTEND", "MIXED")
        ):
            raise PolyattnError(
                f"forward mode {mode.name}: speculative decoding isn't served yet; start SGLang "
                "without --speculative-algorithm, or with another --attention-backend"
            )
        lens = forward.seq_lens_cpu if forward.seq_lens_cpu is not None else forward.seq_lens
        self.lens: list[int] = lens.tolist()
        self.query_lens = [1] * len(self.lens)
        if not mode.is_decode_or_idle():
            self.query_lens = list(forward.extend_seq_lens_cpu)
        self.slots, self.table = forward.out_cache_loc, table
        self._batches: dict[tuple[bool, bool], Batch] = {}

    @property
    def tokens(self) -> int:
        """Query tokens, without SGLang's padding."""
        return sum(self.query_lens)

    def batch(self, sliding: bool, store: bool) -> Batch:
        """Return the step over the pool of sliding layers, or the other; made once."""
        batch = self._batches.get((sliding, store))
        if batch is None:
            longest = max(self.lens, default=0)
            table, slots = self.table(longest, self.slots[: self.tokens], sliding)
            batch = self._batches[sliding, store] = Batch(
                [0, *accumulate(self.query_lens)], self.lens, table, slots if store else None
            )
        return batch


class ServedAttention:
    """The methods of SGLang's `AttentionBackend`. `create` joins them with the class itself.

    `deterministic`: a token has the same bits in any batch, and under any chunking of its prompt.
    """

    def __init__(self, runner: Any, deterministic: bool = False):
        super().__init__()
        self.deterministic = deterministic
        _refuse_model(runner)
        self.page = int(runner.page_size)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        if getattr(self.token_to_kv_pool, "requires_physical_write_loc", False):
            raise PolyattnError("SGLang's unified pool has virtual slots; disable it")
        self.two_pools = bool(getattr(self.token_to_kv_pool, "swa_layer_nums", 0))
        self.chunk: int | None = getattr(runner, "attention_chunk_size", None)
        self.forward_metadata: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the step: once a forward pass, before its layers."""
        indices = forward_batch.req_pool_indices
        self.forward_metadata = Step(forward_batch, lambda *which: self._table(indices, *which))

    def _table(
        self, requests: Tensor, longest: int, slots: Tensor, sliding: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the block table and the slots: SGLang keeps a slot for each token."""
        first = self.req_to_token_pool.req_to_token[requests, : longest : self.page].long()
        if sliding and self.two_pools:
            first = self.token_to_kv_pool.translate_loc_from_full_to_swa(first)
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return (first // self.page).int(), slots.long()

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Store and attend, one query token a sequence."""
        return self._attend(q, k, v, layer, save_kv_cache, **kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Store and attend, any number of new tokens a sequence."""
        return self._attend(q, k, v, layer, save_kv_cache, **kwargs)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, store: bool,
        sinks: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        _refuse(layer, kwargs)
        step: Step = self.forward_metadata
        tokens, heads = step.tokens, layer.tp_q_head_num
        query = q.reshape(-1, heads, layer.qk_head_dim)
        out = query.new_zeros(query.shape[0], heads * layer.v_head_dim)
        window = layer.sliding_window_size
        sliding = window is not None and window > -1
        chunk = self.chunk if layer.use_irope else None
        decoder = layer.attn_type.value == "decoder"
        level: bool | str = self.deterministic and ("steps" if decoder else "batch")
        options = CallOptions(
            decoder,
            float(layer.scaling),
            window + 1 if sliding else None,
            logit_soft_cap=layer.logit_cap or None,
            chunk_size=chunk,
            batch_invariant=level,
        )
        if k is not None and v is not None:
            k = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)[:tokens]
            v = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)[:tokens]
        cache = None
        if layer.attn_type.value == "encoder_only":
            group = self._group(query, layer, options, sinks, cached=False)
            plan: Any = plan_lengths(group, tuple(step.query_lens), tuple(step.query_lens))
        else:
            cache = self._cache(layer, q)
            group = self._group(query, layer, options, sinks, block_size=self.page)
            group.check_format(cache.format)
            if not store:  # a layer that shares another's cache attends to the other's keys
                k = v = None
            plan = group.plan_for(step.batch(sliding or chunk is not None, k is not None))
        LEDGER.count(plan.group)
        result, _ = run_plan(plan, query[:tokens], k, v, cache, sinks=sinks)
        out[:tokens] = result.flatten(1)
        return out

    def _group(
        self, query: Tensor, layer: Any, options: CallOptions, sinks: Tensor | None, **more: Any
    ) -> LayerGroup:
        return group_for_call(
            query, layer.tp_k_head_num, layer.v_head_dim, options, sinks is not None, False, **more
        )

    def _cache(self, layer: Any, like: Tensor) -> KVCache:
        """View the pool's (tokens, heads, size) as pages."""
        key = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if key.dtype != like.dtype or key.dim() != 3:
            raise PolyattnError(
                f"the KV pool holds {key.dtype} of {key.dim()} sizes, the model {like.dtype}: quantised "
                "and head-first pools aren't served yet; --kv-cache-dtype auto"
            )
        return KVCache(key.unflatten(0, (-1, self.page)), value.unflatten(0, (-1, self.page)))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Refuse graphs, because a replay wouldn't refill the plan. Raises `PolyattnError`."""
        raise PolyattnError("CUDA graphs are not served by this backend; --disable-cuda-graph")

    def support_triton(self) -> bool:
        """Whether SGLang may use its own Triton kernels beside this backend."""
        return True


def _refuse_model(runner: Any) -> None:
    """Refuse MLA, and layers that choose keys: only SGLang's own backends call their indexers."""
    config = getattr(getattr(runner, "model_config", None), "hf_config", None)
    name = getattr(config, "model_type", "this model")
    kind = "MLA" if runner.use_mla_backend else ""
    if config is not None and not kind:
        try:
            specs = LayerSpec.from_hf_config(config.to_dict())
        except PolyattnError:
            return  # polyattn can't read the model; its layers are refused one by one
        count = sum(spec.sparse is not None for spec in specs)
        kind = f"sparse ({count} of {len(specs)})" if count else ""
    if kind:
        raise PolyattnError(
            f"{name}: its layers are {kind}, and this backend serves dense attention; start SGLang "
            "with another --attention-backend"
        )


def _refuse(layer: Any, kwargs: dict[str, Any]) -> None:
    refuse(f"layer {layer.layer_id}: use another --attention-backend for this model", **kwargs)
    if layer.is_cross_attention or layer.attn_type.value not in ("decoder", "encoder_only"):
        raise PolyattnError(
            f"layer {layer.layer_id}: attention of type {layer.attn_type.value} (cross: "
            f"{layer.is_cross_attention}) isn't served"
        )
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise PolyattnError(
            f"logit_capping_method={layer.logit_capping_method!r}; 'tanh' is served"
        )
    if layer.xai_temperature_len > 0:
        raise PolyattnError(
            f"layer {layer.layer_id}: xai_temperature_len={layer.xai_temperature_len} scales logits by "
            "positions, which isn't served; use another --attention-backend for this model"
        )
