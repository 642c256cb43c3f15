"""flash-linear-attention's gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from polyattn import AttentionKind, PolyattnError
from polyattn.families.recurrent.function import recurrence
from polyattn.runtime.inputs import refuse
from polyattn.runtime.step.host_copies import lens_between
from polyattn.spec.layer import RecurrentSpec
from torch import Tensor

from polyattn_recurrent.calls import refuse_gradients

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run `q`, `k` (batch, seqlen, key heads, size), `v` (…, heads, v_size), `g`, `beta` (…, heads).

    States (batch, heads, size, v_size), or of sequences packed in one row by `cu_seqlens`. Returns the
    output and the final state, None unless asked.
    """
    refuse(cp_context=cp_context, state_v_first=state_v_first)
    g, beta = _needed("g", g, v), _needed("beta", beta, v)
    beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    lens = _lens(q, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    out, state = _run(q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, lens)
    return out, state if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    gv: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`chunk_gated_delta_rule`, a token at a time; without `g` nothing decays, without `beta` it is 1."""
    refuse(
        gk=gk, gv=gv, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        state_v_first=state_v_first,
    )  # fmt: skip
    heads = v.shape[:3]
    g = v.new_zeros(heads, dtype=torch.float32) if g is None else g
    if beta is None:
        beta = v.new_ones(heads)
    else:
        beta = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    out, state = _run(
        q, k, v, g, beta, scale, initial_state, use_qk_l2norm_in_kernel, _lens(q, cu_seqlens)
    )
    return out, state if output_final_state else None


def _needed(name: str, gate: Tensor | None, v: Tensor) -> Tensor:
    if gate is None:
        raise PolyattnError(
            f"{name}=None: it must be {tuple(v.shape[:3])}, a number for each token and head; "
            "fused_recurrent_gated_delta_rule goes without"
        )
    return gate


def _beta(beta: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    if sigmoid:
        beta = beta.float().sigmoid()
    return beta * 2 if negative else beta


def _lens(q: Tensor, cumulative: Tensor | None) -> tuple[int, ...]:
    if cumulative is None:
        return (q.shape[1],) * q.shape[0]
    return lens_between(cumulative)


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None,
    state: Tensor | None, norm: bool, lens: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_gradients(q, k, v, g, beta, state)
    flat = [t.flatten(0, 1) for t in (q, k.to(q.dtype), v.to(q.dtype), g.float(), beta.float())]
    out, after = recurrence(
        flat, {}, lens, state, kind=AttentionKind.GDN, num_heads=v.shape[2], num_kv_heads=q.shape[2],
        head_size=q.shape[3], v_head_size=v.shape[3], scale=scale or 0.0,
        recurrent=RecurrentSpec(qk_norm=norm),
    )  # fmt: skip
    return out.view(v.shape).to(v.dtype), after
