"""The base of all wrappers: an unused workspace, a plan, and the names that older callers use."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch
from polyattn import KVCache, PolyattnError
from polyattn.host import refuse
from torch import Tensor

from polyattn_flashinfer.calls import Result, Step, checked_layout, plain_dtype, product, result


class Wrapper:
    """A step's plan, and its runs. polyattn has workspaces of its own, so the caller's stays unused.

    `backend` chooses among FlashInfer's kernels, so it isn't read; `POLYATTN_BACKEND` names polyattn's.
    """

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool, jit_args: Any):
        refuse(
            "its kernel is FlashInfer's own; write a variant (docs/variants.md)", jit_args=jit_args
        )
        if use_cuda_graph and not self.captured:
            raise PolyattnError(
                f"use_cuda_graph=True of {type(self).__name__} isn't served: no replay refills its plan; "
                "pass False, or capture polyattn's own layers (LayerSpec.graph_capture)"
            )
        self.is_cuda_graph_enabled = use_cuda_graph
        self.device, self.layout = workspace.device, checked_layout(kv_layout)
        self._int_workspace_buffer = workspace  # engines share FlashInfer's among its wrappers
        self._step: Step | None = None
        self._out_dtype: torch.dtype | None = None
        self._sizes: dict[str, int] = {}

    captured = False
    """Whether a CUDA graph may capture `run`."""

    def reset_workspace_buffer(self, *buffers: Tensor) -> None:
        """Do nothing: the workspace isn't used."""

    @property
    def _planned_step(self) -> Step:
        """The step of `plan`."""
        if self._step is None:
            raise PolyattnError("run() before plan(): call plan() once a step")
        return self._step

    def _planned(self, step: Step, sizes: dict[str, int], out_dtype: Any, *dtypes: Any) -> None:
        """Store a plan. `sizes`: of `run`'s tensors. `dtypes`: checked for their spelling only."""
        for name, word in zip(("q_data_type", "kv_data_type", "data_type"), dtypes, strict=False):
            plain_dtype(name, word)
        self._step, self._out_dtype = step, plain_dtype("o_data_type", out_dtype)
        self._sizes = sizes

    def _check(self, sizes: dict[str, int]) -> None:
        """Raise `PolyattnError` if `run`'s tensors differ from `plan`'s arguments."""
        for name, size in sizes.items():
            if size != self._sizes.get(name, size):
                raise PolyattnError(
                    f"plan() was told {name}={self._sizes[name]}, and run()'s tensors have {size}"
                )

    def _run(
        self, query: Tensor, keys: Any, out: Tensor | None, lse: Tensor | None, return_lse: bool,
        scales: tuple[Any, Any, Any], window_left: int | None = None, sinks: Tensor | None = None,
    ) -> Result:  # fmt: skip
        key = keys.key if isinstance(keys, KVCache) else keys[0]
        page = {"page_size": keys.block_size} if isinstance(keys, KVCache) else {}
        heads = {"num_qo_heads": query.shape[-2], "num_kv_heads": key.shape[-2]}
        self._check(heads | {"head_dim": query.shape[-1]} | page)
        q_scale, k_scale, v_scale = scales
        scale = product(q_scale=q_scale, k_scale=k_scale)
        values, sums = self._attend(query, keys, scale, return_lse, window_left, sinks)
        return result(values, sums, out, lse, v_scale, self._out_dtype)

    def _attend(
        self, query: Tensor, keys: Any, scale: float, needs_lse: bool, window_left: int | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend as `Step.attend`."""
        return self._planned_step.attend(
            query, keys, scale=scale, needs_lse=needs_lse, window_left=window_left, sinks=sinks
        )

    def run(self, *args: Any, **kwargs: Any) -> Result:
        """Run the step of `plan`."""
        raise NotImplementedError

    def run_return_lse(self, *args: Any, **kwargs: Any) -> Result:
        """Run, and return the output and the LSE."""
        return self.run(*args, return_lse=True, **kwargs)

    def forward(
        self, q: Tensor, *keys: Any, causal: bool | None = None, pos_encoding_mode: str = "NONE",
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None,
        rope_scale: float | None = None, rope_theta: float | None = None,
        use_fp16_qk_reduction: bool = False, return_lse: bool = False,
        **scales: float | Tensor | None,
    ) -> Result:  # fmt: skip
        """Run with score options of its own, as FlashInfer's deprecated `forward`."""
        step = self._planned_step
        step.scores = replace(
            step.scores,
            causal=step.scores.causal if causal is None else causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self.run(q, *keys, return_lse=return_lse, **scales)

    forward_return_lse = partialmethod(forward, return_lse=True)

    def end_forward(self) -> None:
        """Do nothing, as FlashInfer's."""
