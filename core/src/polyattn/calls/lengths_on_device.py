"""What if only the device knows the lengths? Steps are planned by bounds, and nothing is copied back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.calls.memo import call_key, memo, remember, remembered
from polyattn.calls.plans import CallOptions, group_for_call, parameters
from polyattn.calls.views import pages_of
from polyattn.errors import BatchError, SelectionError
from polyattn.families.attention.planning import AttentionStep
from polyattn.runtime.backend import Addressed, PageStrides
from polyattn.runtime.group import LayerGroup
from polyattn.runtime.inputs import capturing, own_precision, refuse_gradients
from polyattn.runtime.program import Frame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.host_copies import stored
from polyattn.settings import current_settings


def bind_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    lens: Tensor,
    options: CallOptions,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> BoundPages | None:
    """Return what attends over pages by lengths left on the device, for as many tokens of each sequence.

    `query` (num_seqs, tokens of each, heads, size), or packed (num_seqs * tokens, heads, size); `key`,
    `value` (pages, page size, KV heads, size); `block_table` int32 (num_seqs, pages of a row); `lens`
    int32 (num_seqs,). It serves all tensors that lie as these. None where no backend goes by the
    device's lengths, and with POLYATTN_CHECKS=1, which reads them. What a graph captures needs a call
    of its kind before, outside of the capture. Raises `BatchError`.
    """
    kind = _kind(query, key, value, block_table, lens, options, sinks, alibi_slopes)
    if kind not in memo:
        if capturing(query):
            raise BatchError(
                "the first decode of its kind inside a captured graph; run the step once before"
            )
        _check(query, block_table, lens)
        group = None
        if not current_settings().checks:
            group = _group(query, key, value, options, sinks, alibi_slopes)
        if group is not None:
            group.check_format(pages_of(key, value).format)
            return remember(kind, BoundPages(group, query, key, value, block_table))
        remember(kind, None)
    return memo.get(kind)


def find_bound(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, lens: Tensor, options: CallOptions,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
) -> BoundPages | None:  # fmt: skip
    """Return what `bind_pages` made for tensors that lie as these, so that nothing is checked again."""
    return memo.get(_kind(query, key, value, block_table, lens, options, sinks, alibi_slopes))


def _kind(
    query: Tensor, key: Tensor, value: Tensor, block_table: Tensor, lens: Tensor, options: CallOptions,
    sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> Any:  # fmt: skip
    return call_key(
        query, key, value, bind_pages, options, sinks is None, alibi_slopes is None,
        block_table.dtype, block_table.shape, lens.dtype, lens.shape, lens.is_contiguous(),
    )  # fmt: skip


def _group(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: CallOptions,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> LayerGroup | None:
    try:
        return group_for_call(
            query, key.shape[2], value.shape[3], options, sinks is not None, alibi_slopes is not None,
            block_size=key.shape[1], length_bounds=True,
        )  # fmt: skip
    except SelectionError:
        return None


class Planned(NamedTuple):
    """A plan over one call's lengths and table, and its run by addresses, if there is one."""

    step: AttentionStep
    addressed: Addressed | None


class BoundPages:
    """One way of calling: its backend, and everything that shapes, strides and dtypes decide."""

    __slots__ = (
        "_after", "_captured", "alike", "bounds", "device_type", "group", "lse_shape",
        "needs_lse", "out_shape", "starts", "step_shape", "strides", "tokens",
    )  # fmt: skip

    def __init__(
        self, group: LayerGroup, query: Tensor, key: Tensor, value: Tensor, block_table: Tensor
    ):
        spec, count = group.spec, block_table.shape[0]
        tokens = query.shape[0] * (query.shape[1] if query.dim() == 4 else 1)
        self.group, self.device_type = group, group.device_type
        self.tokens = tokens // max(count, 1)
        self.starts = _starts(count, self.tokens, query.device)
        self.bounds = [block_table.shape[1] * key.shape[1]] * count
        self.strides = _strides(query, key, value)
        self.out_shape = torch.Size((*query.shape[:-1], spec.v_head_size))
        self.step_shape = torch.Size((tokens, spec.num_heads, spec.v_head_size))
        self.lse_shape, self.needs_lse = self.out_shape[:-1], spec.needs_lse
        self.alike = query.shape == self.out_shape and query.is_contiguous()
        self._after: Tensor | None = None
        self._captured: list[Planned] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        block_table: Tensor,
        lens: Tensor,
        *,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; no sequence may be longer than its row of the table, which nobody looks at.

        Returns the output, as `query`, and, where asked, the LSE, float32, one for each of its rows of
        numbers. Raises `BatchError`.
        """
        if torch.is_grad_enabled():
            refuse_gradients(query=query, key=key, value=value)
        params = parameters(self.group.spec, query, sinks, alibi_slopes)
        lse = None
        if self.alike:  # fewer arguments for torch to check
            out = torch.empty_like(query)
        else:
            out = query.new_empty(self.out_shape)
        if self.needs_lse:
            lse = query.new_empty(self.lse_shape, dtype=torch.float32)
        step, addressed = self._plan(block_table, lens)
        if addressed is not None:
            addressed(query, key, value, params, out, lse)
            return out, lse
        tokens = (query if query.dim() == 3 else query.flatten(0, 1)).contiguous()
        of_lse = None if lse is None else lse.view(self.step_shape[:2])
        with own_precision(self.device_type):
            cache, result = pages_of(key, value), out.view(self.step_shape)
            step.run(Frame(tokens, None, None, cache, params, result, of_lse))
        return out, lse

    def after(self, lens: Tensor, count: int) -> Tensor:
        """Return `lens + count`, in a tensor that stays: so do its plans."""
        if self._after is None:
            self._after = torch.empty_like(lens, memory_format=torch.contiguous_format)
        return torch.add(lens, count, out=self._after)

    def _plan(self, block_table: Tensor, lens: Tensor) -> Planned:
        """Return the plan over these tensors, stored on `lens`: their values change nothing in it."""
        where = self, block_table.data_ptr(), block_table.stride()
        plans: dict[Any, Planned] = stored(lens, "_polyattn_plans", False, None, dict)
        plan = plans.get(where)
        # Steps of several tokens each have arrays of their own, copied from the host.
        recorded = self.tokens > 1 and capturing(lens)
        if plan is None:
            if recorded:
                raise BatchError(
                    "a graph is being captured, and the lengths or the block table aren't the tensors of "
                    "the call before it; pass the same tensors, not new views of them"
                )
            # Detached: the tensors themselves, or views of them, would be a circle that nothing collects.
            batch = Batch.on_buffers(
                [self.tokens * i for i in range(len(self.bounds) + 1)],
                self.bounds,
                self.starts,
                lens.detach(),
                block_table.detach(),
                None,
            )
            if len(plans) >= 16:
                plans.clear()
            step = self.group.plan(batch)
            assert isinstance(step, AttentionStep)
            plan = plans[where] = Planned(step, self._addressed(step))
        if recorded and plan not in self._captured:  # which a graph reads as long as it lives
            self._captured.append(plan)
        return plan

    def _addressed(self, step: AttentionStep) -> Addressed | None:
        if len(step.calls) != 1 or self.strides is None:
            return None
        (call,) = step.calls
        if call.rows is not None or call.block_size is not None:
            return None
        return call.backend.addressed_pages(call.plan, self.strides)  # type: ignore[no-any-return]


def _strides(query: Tensor, key: Tensor, value: Tensor) -> PageStrides | None:
    """Return the tensors' strides; None where a query's tokens or numbers have gaps."""
    stride = query.stride()
    if query.dim() == 4:
        if query.shape[1] > 1 and stride[0] != query.shape[1] * stride[1]:
            return None
        stride = (stride[0] if query.shape[1] == 1 else stride[1], *stride[2:])
    if stride[2] != 1:
        return None
    return PageStrides(stride[:2], key.stride()[:3], value.stride()[:3])  # type: ignore[arg-type]


def _check(query: Tensor, block_table: Tensor, lens: Tensor) -> None:
    if block_table.dtype != torch.int32 or block_table.dim() != 2:
        raise BatchError(
            f"block_table is {block_table.dtype} of shape {tuple(block_table.shape)}; it must be "
            "torch.int32 of (num_seqs, pages)"
        )
    count = block_table.shape[0]
    if lens.dtype != torch.int32 or lens.shape != (count,):
        raise BatchError(
            f"lens is {lens.dtype} of shape {tuple(lens.shape)}; it must be torch.int32 of ({count},)"
        )
    rows = query.shape[0]
    if rows % max(count, 1) or (query.dim() == 4 and rows != count):
        raise BatchError(
            f"query {tuple(query.shape)} and a block_table of {count} rows: each sequence must have as "
            "many query tokens"
        )


@remembered
def _starts(count: int, tokens: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(count + 1, dtype=torch.int32, device=device) * tokens
