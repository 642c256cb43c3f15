"""flash-linear-attention's and mamba-ssm's own calls over a step of Mamba-2, without our adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _shaped(work: Any) -> tuple[list[torch.Tensor], int]:
    """Return x, dt, B, C as (sequences, tokens, …), of sequences of one length, and the length."""
    (length,) = {query for query, _ in work.lengths}
    return [t.unflatten(0, (len(work.lengths), length)) for t in work.tokens], length


def simple_gla(work: Any) -> Callable[[], object]:
    """fla's gated linear attention, which Mamba-2's recurrence is an instance of; without D."""
    from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

    (x, dt, B, C), length = _shaped(work)
    call = fused_recurrent_simple_gla if length == 1 else chunk_simple_gla
    q, k = (t.expand(-1, -1, x.shape[2], -1).contiguous() for t in (C, B))
    step = torch.nn.functional.softplus(dt.float() + work.layer.params["dt_bias"])
    g = step * work.layer.params["A"]
    states = torch.nan_to_num(work.states.data[work.batch.state_slots])  # of fresh sequences: NaN
    v = (x * step[..., None]).to(x.dtype)
    skip = x * work.layer.params["D"][:, None]
    out = torch.empty_like(x)

    def run() -> torch.Tensor:
        found, _ = call(
            q=q, k=k, v=v, g=g, scale=1.0, initial_state=states, output_final_state=True,
            state_v_first=True,
        )  # fmt: skip
        torch.add(found, skip, out=out)
        return out

    return run


def mamba_ssm(work: Any) -> Callable[[], object]:
    """mamba-ssm's chunked scan, or its update by one token, from copies of the step's states."""
    (x, dt, B, C), length = _shaped(work)
    params = work.layer.params
    states = torch.nan_to_num(work.states.data[work.batch.state_slots])
    if length > 1:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        return lambda: mamba_chunk_scan_combined(
            x, dt, params["A"], B, C, 256, D=params["D"], dt_bias=params["dt_bias"],
            dt_softplus=True, return_final_states=True, initial_states=states,
        )[0]  # fmt: skip
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    size, state = x.shape[3], states.shape[3]
    A = params["A"][:, None, None].expand(-1, size, state)
    D, bias = (params[n][:, None].expand(-1, size) for n in ("D", "dt_bias"))
    step = dt[:, 0, :, None].expand(-1, -1, size)
    return lambda: selective_state_update(
        states, x[:, 0], step, A, B[:, 0], C[:, 0], D=D, dt_bias=bias, dt_softplus=True
    )
