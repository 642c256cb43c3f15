"""A fake of FlashInfer's attention wrappers: binds the recorded signatures, computes with the reference.

A wrapper runs what it planned last, as the real ones do: their plans are in their buffers.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import flashinfer_host
import polyattn_fakes
from flashinfer_host import INFINITY
from polyattn_fakes import attend_each, attend_packed
from torch import Tensor

MODULES: set[tuple[Any, ...]] = set()
"""What the real ones would have compiled: one module for each kernel, types, sizes and kind of mask."""


class _Wrapper:
    def __init__(self, *args: Any, **kwargs: Any):
        self.made = self.bind("__init__", args, kwargs)

    def bind(self, method: str, args: Any, kwargs: Any) -> dict[str, Any]:
        return polyattn_fakes.bind("flashinfer", f"{type(self).__name__}.{method}", args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Keep what a step is planned for; host tensors are copied, as the real ones copy them."""
        found = self.bind("plan", args, kwargs)
        self.planned = {
            n: v.clone() if isinstance(v, Tensor) else v for n, v in found.items()
        }  # fmt: skip
        MODULES.add((self.kernel(), *self.compiled(found)))

    def kernel(self) -> str:
        """Whose kernels run: paged and ragged prefill share a module."""
        return f"prefill by {self.made['backend']}"

    @staticmethod
    def compiled(planned: dict[str, Any]) -> tuple[Any, ...]:
        """What a module is compiled for beside its kernel."""
        sizes = planned.get("head_dim_qk", planned.get("head_dim")), planned.get("head_dim_vo")
        return (
            planned["q_data_type"], planned["kv_data_type"], sizes[0], sizes[1] or sizes[0],
            planned["window_left"] >= 0, bool(planned["logits_soft_cap"]),
        )  # fmt: skip

    def finish(self, a: dict[str, Any], out: Tensor, lse: Tensor) -> None:
        """Write the output and the LSE in base 2; a row that sees nothing has a finite one.

        The output by its address alone, as prefill.cuh does (`o_stride_n = num_qo_heads * HEAD_DIM_VO`).
        Logits of hidden keys are -5e4 before the scale (`math::inf`): under a small one they'd weigh.
        """
        p = self.planned
        if not (self.made.get("jit_args") or p["logits_soft_cap"]):
            assert INFINITY * p["sm_scale"] * (a.get("k_scale") or 1.0) > 20, "hidden keys weigh"
        a["out"].as_strided(out.shape, out.contiguous().stride()).copy_(out)
        if a["return_lse"]:
            lse = lse.T / math.log(2.0)
            a["lse"].copy_(lse.masked_fill(lse.isinf(), -INFINITY))

    def options(self, causal: bool) -> dict[str, Any]:
        """What `attend_each` takes."""
        p = self.planned
        return {
            "scale": p["sm_scale"], "window": (p["window_left"], 0 if causal else -1),
            "soft_cap": p["logits_soft_cap"] or 0.0,
        }  # fmt: skip

    def pages(self, a: dict[str, Any], indptr: Tensor, indices: Tensor, last: Tensor) -> Any:
        """Each sequence's keys and values."""
        size = self.planned["page_size"]
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index in range(len(last)):
            pages = indices[int(indptr[index]) : int(indptr[index + 1])].long()
            length = max(0, (len(pages) - 1) * size + int(last[index]))
            scales = (a["k_scale"] or 1.0, a["v_scale"] or 1.0)
            for stored, into, scale in zip(a["paged_kv_cache"], found, scales, strict=True):
                assert stored.shape[1] == size and stored.dtype == self.planned["kv_data_type"]
                into.append(stored[pages].flatten(0, 1)[:length].double() * scale)
        return found


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One token a sequence."""

    def kernel(self) -> str:
        return "prefill by fa2" if self.made["use_tensor_cores"] else "decode"

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """On CUDA cores there are kernels of few ratios; a graph's buffers have their sizes."""
        super().plan(*args, **kwargs)
        p, made = self.planned, self.made
        if not made["use_tensor_cores"]:
            assert p["num_qo_heads"] // p["num_kv_heads"] in (1, 2, 3, 4, 8)
        assert p["head_dim"] % 64 == 0
        if made["use_cuda_graph"]:
            assert len(p["last_page_len"]) == len(made["paged_kv_last_page_len_buffer"])
            assert len(p["indices"]) <= len(made["paged_kv_indices_buffer"])

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Attend; nothing bounds the right side."""
        a, p = self.bind("run", args, kwargs), self.planned
        keys, values = self.pages(a, p["indptr"], p["indices"], p["last_page_len"])
        starts = list(range(len(a["q"]) + 1))
        self.finish(a, *attend_each(a["q"], keys, values, starts, **self.options(True)))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Ragged queries over pages."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Attend."""
        a, p = self.bind("run", args, kwargs), self.planned
        lists = (p["paged_kv_indptr"], p["paged_kv_indices"], p["paged_kv_last_page_len"])
        keys, values = self.pages(a, *lists)
        if self.made.get("jit_args") or p["custom_mask"] is not None:
            given = a.get("args", ())
            starts = p["qo_indptr"].tolist()
            self.finish(a, *flashinfer_host.attend(self, given, a["q"], keys, values, starts))
            return
        options = self.options(p["causal"])
        self.finish(a, *attend_each(a["q"], keys, values, p["qo_indptr"].tolist(), **options))


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Ragged queries over packed keys."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Attend."""
        a, p = self.bind("run", args, kwargs), self.planned
        assert (a["k"].shape[2], a["v"].shape[2]) == (p["head_dim_qk"], p["head_dim_vo"])
        starts, key_starts = p["qo_indptr"].tolist(), p["kv_indptr"].tolist()
        if self.made.get("jit_args") or p["custom_mask"] is not None:
            sizes = [b - a for a, b in itertools.pairwise(key_starts)]
            keys, values = (
                list(t[key_starts[0] : key_starts[-1]].split(sizes)) for t in (a["k"], a["v"])
            )
            given = a.get("args", ())
            self.finish(a, *flashinfer_host.attend(self, given, a["q"], keys, values, starts))
            return
        options = self.options(p["causal"])
        self.finish(a, *attend_packed(a["q"], a["k"], a["v"], starts, key_starts, **options))
