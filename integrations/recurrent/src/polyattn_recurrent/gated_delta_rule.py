"""flash-linear-attention's gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import AttentionKind, PolyattnError, RecurrentSpec
from polyattn.host import lens_between, recurrence, refuse
from torch import Tensor
from torch.nn.functional import softplus

from polyattn_recurrent.calls import check_inputs

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int = 64, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `q`, `k` (batch, seqlen, key heads, size), `v` (…, heads, v_size), `g`, `beta` (…, heads).

    States (batch, heads, size, v_size), or (…, v_size, size) with `state_v_first`, or of sequences
    packed in one row by `cu_seqlens`. With `use_gate_in_kernel` the decay is
    -exp(`A_log`) softplus(`g` + `dt_bias`), `A_log`, `dt_bias` (heads,). `chunk_size` changes no result.
    Returns the output and the final state, None unless asked. Raises `PolyattnError`.
    """
    refuse(cp_context=cp_context, **others)
    g, beta = _needed("g", g, v), _needed("beta", beta, v)
    return _run(
        q, k, v, _decay(g, use_gate_in_kernel, A_log, dt_bias),
        _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale, initial_state,
        output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`chunk_gated_delta_rule`, a token at a time; without `g` nothing decays, without `beta` it is 1."""
    refuse(gk=gk, gv=gv, **others)
    heads = v.shape[:3]
    if g is None and not use_gate_in_kernel:
        g = v.new_zeros(heads, dtype=torch.float32)
    if beta is None:
        beta = v.new_ones(heads)
    else:
        beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _run(
        q, k, v, _decay(_needed("g", g, v), use_gate_in_kernel, A_log, dt_bias), beta, scale,
        initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first, cu_seqlens,
    )  # fmt: skip


def _needed(name: str, gate: Tensor | None, v: Tensor) -> Tensor:
    if gate is None:
        raise PolyattnError(
            f"{name}=None: it must be {tuple(v.shape[:3])}, a number for each token and head; "
            "fused_recurrent_gated_delta_rule goes without, unless use_gate_in_kernel=True"
        )
    return gate


def _decay(g: Tensor, gate: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if not gate:  # fla ignores both then
        return g
    if A_log is None:
        raise PolyattnError("A_log=None: use_gate_in_kernel=True needs it, (heads,)")
    g = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * softplus(g)


def _beta(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    if not sigmoid:
        if negative:
            raise PolyattnError(
                "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True; or double beta yourself"
            )
        return beta
    return beta.float().sigmoid() * (2 if negative else 1)


def _lens(q: Tensor, cumulative: Tensor | None) -> tuple[int, ...]:
    if cumulative is None:
        return (q.shape[1],) * q.shape[0]
    return lens_between(cumulative)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
    state: Tensor | None, returns_state: bool, norm: bool, v_first: bool, cumulative: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    check_inputs(q, k, v, g, beta, state)
    state = state.mT if v_first and state is not None else state
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    flat = [t.flatten(0, 1) for t in (q.to(wide), k.to(wide), v.to(wide), g.float(), beta.float())]
    out, after = recurrence(
        flat, {}, _lens(q, cumulative), state, kind=AttentionKind.GDN, num_heads=v.shape[2],
        num_kv_heads=q.shape[2], head_size=q.shape[3], v_head_size=v.shape[3], scale=scale,
        recurrent=RecurrentSpec(qk_norm=norm),
    )  # fmt: skip
    after = after.mT if v_first else after
    return out.view(v.shape).to(v.dtype), after.contiguous() if returns_state else None
