"""Steps as vLLM gives them to a metadata builder: buffers that stay, rows that are padding."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from polyattn_vllm.attention import PolyattnImpl
from polyattn_vllm.layouts import LAYOUTS
from polyattn_vllm.mla import PolyattnMLAImpl
from polyattn_vllm.step import Builder
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

HEADS, KV_HEADS, SIZE, PAGE, LONGEST, ROWS = 4, 2, 64, 16, 256, 8
WIDTH, MOST_TOKENS = LONGEST // PAGE, 64
BLOCKS = ROWS * WIDTH + 1
RANK, ROPE, NOPE, VALUE = 64, 32, 32, 64
"""Sizes of latents, and of heads' keys and values that are made of them."""


class Runner:
    """One layer and what vLLM's model runner keeps for it: a cache and the buffers of a step."""

    def __init__(
        self, device: str, dtype: torch.dtype, graphs: str, drafts: int = 0, causal: bool = True,
        scales: tuple[Tensor, Tensor] = (torch.ones(1), torch.ones(1)), **layer: Any,
    ):  # fmt: skip
        self.device, self.dtype, self.causal = torch.device(device), dtype, causal
        self.scales = scales
        self._make(**layer)
        spec = SimpleNamespace(block_size=PAGE, non_causal=not causal)
        config = self._config(graphs, drafts)
        self.builder = Builder(spec, ["layer"], config, self.device)  # type: ignore[arg-type]

        def ints(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=self.device)

        self.starts, self.lens = ints(ROWS + 1), ints(ROWS)
        self.table = ints(ROWS, WIDTH)
        self.slots = ints(MOST_TOKENS, dtype=torch.int64)

    def _make(self, **layer: Any) -> None:
        """Make the layer and its cache, and keep the cache's numbers."""
        self.impl: Any = PolyattnImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, **layer)
        k_scale, v_scale = (scale.to(self.device) for scale in self.scales)
        self.layer = SimpleNamespace(
            impl=self.impl, head_size_v=SIZE, _k_scale_float=1.0, _v_scale_float=1.0,
            _k_scale=k_scale, _v_scale=v_scale,
        )  # fmt: skip
        whole = torch.randn(BLOCKS, PAGE, KV_HEADS, 2 * SIZE).clamp(-2, 2)
        if "fp8" in self.impl.kv_cache_dtype:
            self.numbers = whole.to(torch.float8_e4m3fn)
            whole = self.numbers.view(torch.uint8)
        else:
            whole = self.numbers = whole.to(self.dtype)
        self.cache = whole.to(self.device).transpose(1, 2)

    def _config(self, graphs: str, drafts: int) -> Any:
        if not LAYOUTS:  # vLLM 0.28
            from vllm.v1.attention.backends.utils import set_kv_cache_layout

            set_kv_cache_layout("NHD")
        return SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=self.dtype, max_model_len=LONGEST, is_mm_prefix_lm=False, rswa_window=None
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1
            ),
            diffusion_config=None,
            attention_config=SimpleNamespace(use_non_causal=False),
            compilation_config=SimpleNamespace(
                static_forward_context={"layer": self.layer},
                cudagraph_mode=CUDAGraphMode[graphs],
                max_cudagraph_capture_size=MOST_TOKENS,
            ),
            device_config=SimpleNamespace(device=self.device),
            cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: LAYOUTS["NHD"]),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            scheduler_config=SimpleNamespace(async_scheduling=False),
        )

    def step(
        self, lens: list[int], padded: int, table: Tensor, each: int = 1
    ) -> CommonAttentionMetadata:
        """Fill the buffers with a step of `each` tokens a row, padded to `padded` rows."""
        return self.ragged([each] * len(lens), lens, padded, padded * each, table)

    def ragged(
        self, queries: list[int], lens: list[int], rows: int, tokens: int, table: Tensor
    ) -> CommonAttentionMetadata:
        """Fill the buffers with a step of any rows, padded to so many rows and tokens."""
        count = len(lens)
        starts = torch.tensor([0, *accumulate(queries)] + [sum(queries)] * (rows - count))
        host = torch.tensor(lens + [0] * (rows - count), dtype=torch.int32)
        self.starts[: rows + 1] = starts.to(self.device)
        self.lens[:rows] = host.to(self.device)
        self.table[:count] = table.to(self.device)
        self.table[count:rows] = 0
        self.slots[:tokens] = -1
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: rows + 1], query_start_loc_cpu=starts.int(),
            seq_lens=self.lens[:rows], seq_lens_cpu_upper_bound=host, num_reqs=rows,
            num_actual_tokens=tokens, max_query_len=max(queries), max_seq_len=max(lens),
            causal=self.causal, block_table_tensor=self.table[:rows],
            slot_mapping=self.slots[:tokens],
        )  # fmt: skip

    def made_up(self, tokens: int) -> CommonAttentionMetadata:
        """Fill them with the step that vLLM captures a graph of prompts and decodes with."""
        rows = min(tokens, ROWS)
        queries = [tokens // rows] * rows
        queries[-1] += tokens % rows
        common = self.ragged(queries, [tokens] * rows, rows, tokens, torch.zeros(rows, 1).int())
        common.max_query_len, common.max_seq_len = tokens, LONGEST
        return common

    def attend(self, query: Tensor, step: Any) -> Tensor:
        """Run the layer as vLLM does; its keys and values are in the cache."""
        return self.impl.forward(
            self.layer, query, query, query, self.cache, step, torch.empty_like(query)
        )

    def expected(
        self, query: Tensor, lens: list[int], table: Tensor, queries: int | list[int] = 1
    ) -> Tensor:
        """Return the step's output in float64, of the rows that are no padding."""
        each = [queries] * len(lens) if isinstance(queries, int) else queries
        window = self.impl.fields.get("sliding_window") or LONGEST
        cap, rows = self.impl.fields.get("logit_soft_cap"), []
        for row, length in enumerate(lens):
            stored = self.numbers.double()[table[row].long()].flatten(0, 1)[:length]
            key, value = self._keys(stored)
            for token in range(each[row]):
                end = length - each[row] + 1 + token if self.causal else length
                seen = slice(max(0, end - window), end)
                logit = torch.einsum("hd,nhd->hn", query[len(rows)].double(), key[seen])
                logit = logit * self.impl.scale
                if cap is not None:
                    logit = cap * (logit / cap).tanh()
                rows.append(torch.einsum("hn,nhd->hd", logit.softmax(-1), value[seen]))
        return torch.stack(rows)

    def _keys(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of each query head, of what the cache holds of a row."""
        both = stored.repeat_interleave(HEADS // KV_HEADS, 1).split(SIZE, -1)
        scales = [
            s.double().expand(KV_HEADS).repeat_interleave(HEADS // KV_HEADS) for s in self.scales
        ]
        key, value = (t * s.view(-1, 1) for t, s in zip(both, scales, strict=True))
        return key, value


class LatentRunner(Runner):
    """The same with a layer of MLA, over a cache of latents."""

    def _make(self, **layer: Any) -> None:
        self.impl = PolyattnMLAImpl(
            HEADS, RANK + ROPE, (NOPE + ROPE) ** -0.5, 1, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
            qk_head_dim=NOPE + ROPE, v_head_dim=VALUE, **{"kv_cache_dtype": "auto", **layer},
        )  # fmt: skip
        halves = torch.randn(HEADS, NOPE, RANK) / RANK**0.5, torch.randn(HEADS, RANK, VALUE) / 8
        self.halves = [half.to(self.dtype) for half in halves]
        up, down = (half.to(self.device) for half in self.halves)
        one = torch.ones(1, device=self.device)
        self.layer = SimpleNamespace(
            impl=self.impl, W_UK_T=up, W_UV=down, _k_scale=one, _k_scale_float=1.0
        )
        self.numbers = torch.randn(BLOCKS, PAGE, RANK + ROPE).clamp(-2, 2).to(self.dtype)
        self.cache = self.numbers.to(self.device)

    def attend(self, query: Tensor, step: Any) -> Tensor:
        """Run the layer as vLLM does; its latents are in the cache."""
        out = query.new_empty(len(query), HEADS * VALUE)
        scale = self.layer._k_scale
        self.impl.forward_mha(query, query, query, self.cache, step, scale, out)
        return out.unflatten(-1, (HEADS, VALUE))

    def _keys(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        latent, rope = stored.split([RANK, ROPE], -1)
        up, down = (half.double() for half in self.halves)
        own = torch.einsum("nr,hdr->nhd", latent, up)
        key = torch.cat([own, rope[:, None].expand(-1, HEADS, -1)], -1)
        return key, torch.einsum("nr,hrd->nhd", latent, down)


def random_step(rows: int, each: int = 1) -> tuple[list[int], Tensor]:
    """Return lengths, and a block table of blocks in any order."""
    lens = torch.randint(each, LONGEST, (rows,)).tolist()
    return lens, random_table(rows)


STEPS = (
    ([1, 1, 5, 9], [40, 7, 5, 100], 16),
    ([1, 1, 1, 1, 1, 1, 1, 9], [9, 30, 1, 256, 17, 16, 33, 9], 16),
    ([16], [250], 16),
    ([1, 2], [64, 66], 4),
    ([1, 1, 1, 1], [64, 1, 31, 32], 4),
    ([3], [3], 4),
    ([1] * 8, [5, 6, 7, 8, 200, 100, 50, 25], 8),
)
"""Query tokens and lengths of each row of steps of prompts and decodes, and the tokens of their graph."""


def random_table(rows: int) -> Tensor:
    """Return a block table of blocks in any order."""
    return (torch.randperm(ROWS * WIDTH)[: rows * WIDTH] + 1).view(rows, WIDTH).int()
