"""What does a call without a layer ask for, and which group and plan serve it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.calls.lightest_backend import server_of
from polyattn.calls.memo import group_for, group_of, place_of, remembered
from polyattn.errors import BatchError
from polyattn.families.attention.alibi import alibi_slopes as default_slopes
from polyattn.families.attention.planning import AttentionStep
from polyattn.registry.discovery import generation
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import check_parameter, refuse_gradients
from polyattn.runtime.program import LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.settings import Settings, current_settings
from polyattn.spec.fields import LONGEST
from polyattn.spec.kinds import DTYPES
from polyattn.spec.layer import LayerSpec


class CallOptions(NamedTuple):
    """The options of a call beside its tensors: fields of `LayerSpec`, and a backend by name.

    Attributes:
        causal: whether a query sees no later key; aligned to the bottom right.
        scale: of the scores; None: 1 / sqrt(head size).
        sliding_window: keys up to and including the query's own, in tokens; None: no window.
        window_right: keys after the query's own, in tokens, without a causal mask.
        logit_soft_cap: scores become cap * tanh(score / cap).
        chunk_size: tokens of the chunks within which queries see keys.
        needs_lse: whether the call returns the LSE.
        backend: the backend that must serve, by name; None: the selection decides.
        sink_tokens: first tokens that a window never hides.
        batch_invariant: what must not change a bit of a row's result.

    Examples:
        >>> CallOptions(causal=True, sliding_window=128).window_right is None
        True

    """

    causal: bool = False
    scale: float | None = None
    sliding_window: int | None = None
    window_right: int | None = None
    logit_soft_cap: float | None = None
    chunk_size: int | None = None
    needs_lse: bool = False
    backend: str | None = None
    sink_tokens: int = 0
    batch_invariant: bool | str = False


def flash_window(causal: bool, left: int, right: int) -> tuple[bool, int | None, int | None]:
    """Return the options of a flash-attn window.

    Args:
        causal: flash-attn's `causal`.
        left: keys left of the query; -1 means no bound.
        right: keys right of the query; -1 means no bound.

    Returns:
        `causal`, `sliding_window` and `window_right`, as `CallOptions` has them.

    Examples:
        >>> flash_window(True, 127, 0), flash_window(False, -1, -1)
        ((True, 128, None), (False, None, None))

    """
    causal, after = causal or right == 0, None
    if not causal and (left >= 0 or right >= 0):
        after = int(right) if right >= 0 else LONGEST
    return causal, int(left) + 1 if left >= 0 else None, after


def group_for_call(
    query: Tensor,
    kv_heads: int,
    v_size: int,
    options: CallOptions,
    sinks: bool,
    alibi: bool,
    **more: Any,
) -> LayerGroup:
    """Return the group that serves a call, the same one for equal calls.

    Args:
        query: (..., num_heads, head_size); its device and dtype count.
        kv_heads: heads of the keys.
        v_size: elements of a value.
        options: the options of the call.
        sinks: whether learned sinks come with it.
        alibi: whether ALiBi slopes come with it.
        more: further fields of `LayerSpec`, as in `group_for`.

    Raises:
        SpecError, SelectionError: as `select`.

    Examples:
        >>> from polyattn.host import CallOptions, group_for_call
        >>> query = torch.randn(5, 4, 64)
        >>> group = group_for_call(query, 2, 64, CallOptions(causal=True), False, False, cached=False)
        >>> group.spec.num_heads, group.spec.num_kv_heads
        (4, 2)

    """
    *_, heads, size = query.shape
    device = query.device
    return group_of(
        _for_call, current_settings(), generation(), place_of(device), device, query.dtype, heads, size,
        kv_heads, v_size, options, sinks, alibi, **more,
    )  # fmt: skip


def _for_call(
    settings: Settings, plugins: int, place: Any, device: torch.device, dtype: torch.dtype,
    heads: int, size: int, kv_heads: int, v_size: int, options: CallOptions, sinks: bool, alibi: bool,
    **more: Any,
) -> LayerGroup:  # fmt: skip
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise BatchError(
            f"query is {dtype}; a call without a layer takes {', '.join(DTYPES)}: convert it, or "
            f"pass 8-bit queries with their scales to an Attention whose spec has qkv_dtype"
        )
    return group_for(
        device, options.backend, num_heads=heads, num_kv_heads=kv_heads, head_size=size,
        v_head_size=v_size, dtype=dtype, causal=options.causal, scale=options.scale,
        sliding_window=options.sliding_window, window_right=options.window_right,
        logit_soft_cap=options.logit_soft_cap, chunk_size=options.chunk_size,
        sink_tokens=options.sink_tokens, needs_lse=options.needs_lse, learned_sinks=sinks, alibi=alibi,
        batch_invariant=options.batch_invariant, **more,
    )  # fmt: skip


@remembered
def plan_lengths(
    group: LayerGroup,
    query_lens: tuple[int, ...],
    key_lens: tuple[int, ...],
    apart: int | tuple[int, ...] | None = None,
    first_positions: tuple[int, ...] | None = None,
) -> AttentionStep:
    """Return the plan for sequences of these lengths. A plan is a value, so equal calls share one.

    Args:
        group: of the layer. A short step's plan may belong to another group that serves the same layer.
        query_lens: query tokens of each sequence.
        key_lens: keys of each sequence.
        apart: tokens between sequences' first keys, or where each one's first key is; default: keys lie
            one sequence after another.
        first_positions: as in `Batch`.

    Raises:
        BatchError: lengths don't fit one another.

    Examples:
        >>> group = group_for(
        ...     torch.device("cpu"), num_heads=2, head_size=64, dtype=torch.float32, cached=False
        ... )
        >>> plan_lengths(group, (5, 1), (5, 40)) is plan_lengths(group, (5, 1), (5, 40))
        True

    """
    starts: Sequence[int] | None = None
    if isinstance(apart, int):
        starts = range(0, apart * len(key_lens), apart) if apart else [0] * len(key_lens)
    elif apart is not None:
        starts = apart
    batch = Batch.from_lens(
        query_lens,
        key_lens,
        key_starts=starts,
        first_positions=first_positions,
        device=group.torch_device,
    )
    step = server_of(group, query_lens, key_lens).plan(batch)
    assert isinstance(step, AttentionStep)
    return step


def run_plan(
    step: StepPlan,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: KVCache | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run a step whose parameters come with the call.

    Args:
        step: the plan.
        query: (tokens, heads, size).
        key: the new tokens' (tokens, KV heads, size), or all keys of a layer without a cache; None: the
            cache has them.
        value: as `key`.
        cache: the layer's cache, if it has one.
        sinks: float32 (heads,), learned sink logits.
        alibi_slopes: float32 (heads,).

    Returns:
        The output (tokens, heads, v_size), and the LSE, float32 (tokens, heads), if the spec needs it,
        else None.

    Raises:
        BatchError: a tensor doesn't fit the plan.

    Examples:
        >>> group = group_for(
        ...     torch.device("cpu"), num_heads=2, head_size=64, dtype=torch.float32, cached=False
        ... )
        >>> query, key, value = torch.randn(3, 3, 2, 64)
        >>> run_plan(plan_lengths(group, (3,), (3,)), query, key, value)[0].shape
        torch.Size([3, 2, 64])

    """
    assert isinstance(step, AttentionStep)
    params = parameters(step.group.spec, query, sinks, alibi_slopes)
    lse = None
    if step.group.spec.needs_lse:
        lse = query.new_empty(step.lse_shape, dtype=torch.float32)
    return step.call(query, key, value, cache, params, None, lse), lse


PLAIN = LayerParams()


def parameters(
    spec: LayerSpec, query: Tensor, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> LayerParams:
    """Return the parameters of a call beside its tensors. Raises `BatchError`."""
    if not spec.learned_sinks and not spec.alibi and sinks is None and alibi_slopes is None:
        return PLAIN
    if spec.alibi and alibi_slopes is None:
        alibi_slopes = default_slopes(spec.num_heads)
    return LayerParams(
        _per_head("sinks", sinks, spec.learned_sinks, query, spec),
        _per_head("alibi_slopes", alibi_slopes, spec.alibi, query, spec),
    )


def _per_head(
    name: str, tensor: Tensor | None, wanted: bool, like: Tensor, spec: LayerSpec
) -> Tensor | None:
    if (tensor is not None) != wanted or (tensor is not None and tensor.shape != (spec.num_heads,)):
        shape = None if tensor is None else tuple(tensor.shape)
        raise BatchError(f"{name} has shape {shape}; {spec} takes one number a query head")
    if tensor is None:
        return None
    refuse_gradients(**{name: tensor})
    check_parameter(name, tensor)
    return tensor.detach().to(like.device, torch.float32).contiguous()
