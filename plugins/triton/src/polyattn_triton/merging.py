"""How do the parts of a plan's cut tiles become one? A second launch, a program for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyattn.kernel import LayerSpec
from torch import Tensor

from polyattn_triton.kernels.parts import merge_kernel
from polyattn_triton.launch import Site, merge_options
from polyattn_triton.variants import merging_constants

if TYPE_CHECKING:
    from polyattn_triton.plan import AttentionPlan


class Merger:
    """Launches `merge_kernel`, specialised for the strides that it meets."""

    def __init__(self, spec: LayerSpec, early: bool, summed: bool):
        """`early`: it may be scheduled while the kernel before runs. `summed`: there is no softmax."""
        self.spec, self.early, self.summed = spec, early, summed
        self._sites: dict[tuple[Any, ...], Site] = {}

    def __call__(
        self,
        plan: AttentionPlan,
        sinks: Tensor | None,
        scales: tuple[Tensor, Tensor],
        v_scale: float,
        out: Tensor,
        lse: Tensor | None,
        strides: tuple[int, int, int],
    ) -> None:
        """Merge, where `plan.merging` says what. `scales`: of values and of the output.

        `strides`: of the output's tokens and heads, and of the LSE's tokens, in elements.
        """
        merging, spec = plan.merging, self.spec
        assert merging is not None
        # The plan's own buffers: a later plan may have made the workspace grow.
        parts, part_lse = plan.kept.own[:2]
        key = (
            plan.way,
            plan.rows,
            strides[:2],
            lse is None,
            merging.few,
            merging.wide,
            merging.alike,
        )
        site = self._sites.get(key)
        if site is None:
            constants = merging_constants(
                spec, merging, plan.way, plan.rows, lse is not None, self.early, self.summed
            )
            options = merge_options(merging, spec.v_head_size, self.early)
            site = self._sites[key] = Site(merge_kernel, strides[:2], constants, options)
        site(
            merging.grid(plan.rows, spec.num_kv_heads, spec.v_head_size),
            (
                parts,
                part_lse,
                out,
                out if lse is None else lse,
                part_lse if sinks is None else sinks,
                *scales,
                plan.batch.query_start_loc,
                plan.work,
            ),
            (v_scale,),
            (strides[2], plan.splits if plan.way == "many" else plan.grid[0], int(merging.by_tile)),
        )
