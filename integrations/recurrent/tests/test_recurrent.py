"""The functions of three libraries beside transformers' own torch forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from polyattn import LayerGroup, PolyattnError, StateCache
from polyattn_recurrent import causal_conv1d, gated_delta_rule, mamba1, mamba2, mamba_state
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def close(found: Any, wanted: Any, limit: float = 1e-5) -> None:
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit, check_dtype=False)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("activation", [None, "silu"])
@torch.no_grad()
def test_convolution(activation: str | None) -> None:
    x, weight, bias = rand(2, 6, 9), rand(6, 4), rand(6)
    wanted = modeling_mamba2.causal_conv1d_fn(x, weight, bias, activation=activation)
    close(causal_conv1d.causal_conv1d_fn(x, weight, bias, activation=activation), wanted)
    # In two parts, the state between them; and the last tokens one by one, over a longer state.
    _, state = causal_conv1d.causal_conv1d_fn(x[..., :4], weight, bias, return_final_states=True)
    later = causal_conv1d.causal_conv1d_fn(
        x[..., 4:], weight, bias, initial_states=state, activation=activation
    )
    close(later, wanted[..., 4:])
    for size in (3, 4):
        ours, theirs = x[..., 4 - size : 4].clone(), x[..., 4 - size : 4].clone()
        for at in range(4, 9):
            token = x[..., at : at + 1]
            out = causal_conv1d.causal_conv1d_update(token, ours, weight, bias, activation)
            close(
                out, modeling_mamba2.causal_conv1d_update(token, theirs, weight, bias, activation)
            )
            close(out, wanted[..., at : at + 1])
            close(ours, theirs)


@pytest.mark.parametrize("columns", [3, 4, 7])
@torch.no_grad()
def test_convolution_over_a_ring(columns: int) -> None:
    """Of each call's tokens some are rejected: the next call's positions say so."""
    weight, bias, room = rand(6, 4), rand(6), columns - 3
    state, streams, had = torch.zeros(2, 6, columns), [rand(6, 0), rand(6, 0)], [0, 0]
    for turn in range(9):
        drafts = rand(2, 6, 1 + turn % (room + 1))
        out = causal_conv1d.causal_conv1d_update(
            drafts, state, weight, bias, "silu",
            cache_seqlens=torch.tensor(had, dtype=torch.int32),
        )  # fmt: skip
        for row in range(2):
            whole = torch.cat([streams[row], drafts[row]], 1)
            wanted = modeling_mamba2.causal_conv1d_fn(whole[None], weight, bias, activation="silu")
            close(out[row], wanted[0, :, had[row] :])
            had[row] += 1 + (turn + row) % drafts.shape[2]
            streams[row] = whole[:, : had[row]]


@torch.no_grad()
def test_convolution_of_several_sequences_in_a_row() -> None:
    x, weight, bias = rand(2, 6, 9), rand(6, 4), rand(6)
    seq_idx = torch.tensor([[4] * 5 + [0] * 4, [0] * 2 + [1] * 6 + [-1]], dtype=torch.int32)
    out = causal_conv1d.causal_conv1d_fn(x, weight, bias, seq_idx=seq_idx, activation="silu")
    for row, first, last in ((0, 0, 5), (0, 5, 9), (1, 0, 2), (1, 2, 8)):
        part = x[row : row + 1, :, first:last]
        wanted = modeling_mamba2.causal_conv1d_fn(part, weight, bias, activation="silu")
        close(out[row : row + 1, :, first:last], wanted)
    assert not out[1, :, 8].any()


@torch.no_grad()
def test_convolution_over_slots() -> None:
    pool, weight, slots = rand(5, 6, 3), rand(6, 4), torch.tensor([3, 1])
    before, x = pool.clone(), rand(2, 6)
    out = causal_conv1d.causal_conv1d_update(x, pool, weight, conv_state_indices=slots)
    state = before[slots]
    close(out, modeling_mamba2.causal_conv1d_update(x[..., None], state, weight)[..., 0])
    close(pool[slots], state)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def scan_inputs(rows: int = 2, count: int = 11) -> tuple[list[Tensor], dict[str, Any]]:
    x, dt = rand(rows, count, 6, 8), rand(rows, count, 6)
    given = {"D": rand(6), "dt_bias": rand(6), "dt_softplus": True}
    return [x, dt, -torch.rand(6) - 0.1, rand(rows, count, 2, 4), rand(rows, count, 2, 4)], given


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.2, 0.9)])
@pytest.mark.parametrize("soft", [True, False])
@torch.no_grad()
def test_chunk_scan(limit: tuple[float, float], soft: bool) -> None:
    """Without a softplus half of the steps are negative, which the usual limit holds at 0."""
    tensors, given = scan_inputs()
    given["dt_softplus"] = soft
    given |= {"dt_limit": limit, "return_final_states": True}
    wanted, state = modeling_mamba2.mamba2_chunk_scan(*tensors, 4, **given)
    out, after = mamba2.mamba_chunk_scan_combined(*tensors, 4, **given)
    close(out, wanted, 1e-4)
    close(after, state, 1e-4)
    again = {"initial_states": state, **given}
    z = rand(*wanted.shape)
    wanted, last = modeling_mamba2.mamba2_chunk_scan(*tensors, 4, **again)
    out, after = mamba2.mamba_chunk_scan_combined(*tensors, 4, z=z, **again)
    close(out, wanted * silu(z), 1e-4)
    close(after, last, 1e-4)


@pytest.mark.parametrize("slots", [False, True])
@torch.no_grad()
def test_one_token_of_mamba_2(slots: bool) -> None:
    (x, dt, A, B, C), given = scan_inputs(count=1)
    pool = rand(4, 6, 8, 4)
    at = torch.tensor([2, 0]) if slots else None
    ours = pool.clone() if slots else pool[:2].clone()
    theirs = pool[at] if at is not None else pool[:2].clone()
    step = [
        x[:, 0], dt[:, 0, :, None].expand(-1, -1, 8), A[:, None, None].expand(-1, 8, 4), B[:, 0],
        C[:, 0], given["D"][:, None].expand(-1, 8),
    ]  # fmt: skip
    bias = given["dt_bias"][:, None].expand(-1, 8)
    more: dict[str, Any] = {"dt_bias": bias, "dt_softplus": True, "z": rand(2, 6, 8)}
    wanted = modeling_mamba2.mamba2_selective_state_update(theirs, *step, **more)
    found = mamba_state.selective_state_update(ours, *step, **more, state_batch_indices=at)
    close(found, wanted)
    close(ours if at is None else ours[at], theirs)
    if at is not None:
        assert torch.equal(ours[[1, 3]], pool[[1, 3]])
    # Each of a head's sizes has numbers of its own.
    theirs = ours[at] if at is not None else ours.clone()
    own = [
        step[0], rand(2, 6, 8), -torch.rand(6, 8, 4), *step[3:5], rand(6, 8)
    ]  # fmt: skip
    more["dt_bias"] = rand(6, 8)
    wanted = one_token(theirs, *own, **more)
    found = mamba_state.selective_state_update(ours, *own, **more, state_batch_indices=at)
    close(found, wanted)
    close(ours if at is None else ours[at], theirs)
    with pytest.raises(PolyattnError, match="D .* differs within a head"):
        mamba2.mamba_chunk_scan_combined(
            x, dt, A, B, C, 4, D=rand(6, 8), dt_bias=rand(6), dt_softplus=True
        )


def one_token(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor,
    dt_bias: Tensor, dt_softplus: bool = True,
) -> Tensor:  # fmt: skip
    """Take one token as mamba-ssm's documentation says, (batch, heads, size) in float64."""
    assert dt_softplus
    step = softplus((dt + dt_bias).double())[..., None]
    B, C = (t.double().repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (B, C))
    after = state * torch.exp(step * A) + step * B[:, :, None] * x.double()[..., None]
    state.copy_(after)
    out = (after * C[:, :, None]).sum(-1) + D * x.double()
    return out * silu(z.double())


PADDED = [(-1, 3, -1, 0), (3, 0, -5, -1), (-1, -1, -1, -2), (2, 4, 0, 3)]


@pytest.mark.parametrize("at", PADDED)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_padding_rows_of_a_convolution(at: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row whose slot is negative has no state; the last slot is a live request's."""
    slots, weight, x = torch.tensor(at, dtype=dtype), rand(6, 4), rand(4, 6, 2)
    live = slots >= 0
    for cache_seqlens in (None, torch.tensor([5, 2, 9, 7], dtype=torch.int32)):
        pool = rand(5, 6, 4)
        pool[[i for i in range(5) if i not in at]] = torch.nan
        wanted, mine = pool.clone(), pool[slots[live]]
        seqlens = None if cache_seqlens is None else cache_seqlens[live]
        if live.any():
            alone = causal_conv1d.causal_conv1d_update(x[live], mine, weight, cache_seqlens=seqlens)
            wanted[slots[live]] = mine
        out = causal_conv1d.causal_conv1d_update(
            x, pool, weight, cache_seqlens=cache_seqlens, conv_state_indices=slots
        )
        assert not out[~live].any()
        assert not live.any() or torch.equal(out[live], alone)
        assert torch.equal(pool.nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))


@pytest.mark.parametrize("at", PADDED)
@pytest.mark.parametrize("heads", [False, True])
@torch.no_grad()
def test_padding_rows_of_a_mamba(at: tuple[int, ...], heads: bool) -> None:
    slots, size = torch.tensor(at, dtype=torch.int32), (3, 8) if heads else (6,)
    live, pool = slots >= 0, rand(5, *size, 4)
    pool[[i for i in range(5) if i not in at]] = torch.nan
    one = [rand(4, *size), rand(4, *size), -torch.rand(*size, 4)]
    B, C = (rand(4, 3, 4), rand(4, 3, 4)) if heads else (rand(4, 4), rand(4, 4))
    more: dict[str, Any] = {"dt_bias": rand(*size), "dt_softplus": True}
    z, wanted, mine = rand(4, *size), pool.clone(), pool[slots[live]]
    if live.any():
        alone = mamba_state.selective_state_update(
            mine, one[0][live], one[1][live], one[2], B[live], C[live], z=z[live], **more
        )
        wanted[slots[live]] = mine
    out = mamba_state.selective_state_update(
        pool, *one, B, C, z=z, **more, state_batch_indices=slots
    )
    assert not out[~live].any()
    if live.any():
        close(out[live], alone)
    close(pool.nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_b_and_c_are_not_rounded(tied: bool) -> None:
    """B and C in float32 beside x in 16 bits: the state says whether they were rounded."""
    (x, dt, A, B, C), given = scan_inputs(count=1)
    x, z = x.bfloat16(), torch.zeros(2, 6, 8)
    if tied:
        dts, As = dt[:, 0, :, None].expand(-1, -1, 8), A[:, None, None].expand(-1, 8, 4)
        D, bias = (given[n][:, None].expand(-1, 8) for n in ("D", "dt_bias"))
    else:
        dts, As, D, bias = rand(2, 6, 8), -torch.rand(6, 8, 4), rand(6, 8), rand(6, 8)
    ours = rand(2, 6, 8, 4)
    theirs = ours.double()
    step = (x[:, 0], dts, As, B[:, 0], C[:, 0], D)
    one_token(theirs, *step, z=z, dt_bias=bias)
    mamba_state.selective_state_update(ours, *step, dt_bias=bias, dt_softplus=True)
    close(ours, theirs, 1e-5)
    if tied:
        _, last = mamba2.mamba_chunk_scan_combined(
            x, dt, A, B, C, 4, return_final_states=True, **given
        )
        fresh = torch.zeros(2, 6, 8, 4, dtype=torch.float64)
        one_token(fresh, *step, z=z, dt_bias=bias)
        close(last, fresh, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_groups_of_mamba_1(dtype: torch.dtype) -> None:
    x, dt, A = rand(2, 6, 9).to(dtype), rand(2, 6, 9), -torch.rand(6, 4)
    B, C, D = rand(2, 3, 4, 9), rand(2, 3, 4, 9), rand(6)
    out, last = mamba1.selective_scan_fn(x, dt, A, B, C, D, return_last_state=True)
    for i in range(3):
        cut = slice(2 * i, 2 * i + 2)
        wanted, state = modeling_mamba.mamba_selective_scan(
            x[:, cut].float(), dt[:, cut], A[cut], B[:, i], C[:, i], D=D[cut],
            return_last_state=True,
        )  # fmt: skip
        close(out[:, cut], wanted, 1e-4 if dtype == torch.float32 else 2e-2)
        close(last[:, cut], state, 1e-4)
    with pytest.raises(PolyattnError, match=r"B \(6, 4\), C .*: both must be"):
        mamba1.selective_scan_fn(x, dt, A, rand(6, 4), C[:, 0])


@torch.no_grad()
def test_mamba_1() -> None:
    x, dt, z = rand(2, 6, 9), rand(2, 6, 9), rand(2, 6, 9)
    A, B, C, D, bias = -torch.rand(6, 4), rand(2, 4, 9), rand(2, 4, 9), rand(6), rand(6)
    more: dict[str, Any] = {
        "D": D, "z": z, "delta_bias": bias, "delta_softplus": True, "return_last_state": True
    }  # fmt: skip
    wanted, state = modeling_mamba.mamba_selective_scan(x, dt, A, B, C, **more)
    out, last = mamba1.selective_scan_fn(x, dt, A, B, C, **more)
    close(out, wanted, 1e-4)
    close(last, state, 1e-4)
    step = [x[..., 0], dt[..., 0], A, B[..., 0], C[..., 0], D]
    theirs = state.clone()
    wanted = modeling_mamba.mamba_selective_state_update(
        theirs, *step, z=z[..., 0], dt_bias=bias, dt_softplus=True
    )
    found = mamba_state.selective_state_update(
        last, *step, z=z[..., 0], dt_bias=bias, dt_softplus=True
    )
    close(found, wanted, 1e-4)
    close(last, theirs, 1e-4)


def delta_inputs(rows: int, count: int) -> list[Tensor]:
    q, k, v = rand(rows, count, 2, 8), rand(rows, count, 2, 8), rand(rows, count, 4, 6)
    return [q, k, v, -softplus(rand(rows, count, 4)), rand(rows, count, 4).sigmoid()]


def test_a_scale_of_nothing_is_no_default() -> None:
    with pytest.raises(PolyattnError, match="scale=0"):
        gated_delta_rule.chunk_gated_delta_rule(*delta_inputs(1, 3), scale=0.0)


@torch.no_grad()
def test_a_sequence_without_tokens_ends_as_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel writes its state: what was in that memory before must not be it."""
    allocate = LayerGroup.allocate_states

    def used(group: LayerGroup, count: int) -> StateCache:
        states = allocate(group, count)
        states.data.fill_(torch.nan)
        return states

    monkeypatch.setattr(LayerGroup, "allocate_states", used)
    q, k, v, g, beta = delta_inputs(1, 9)
    for start in (None, rand(3, 4, 8, 6)):
        _, after = gated_delta_rule.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=start, output_final_state=True,
            cu_seqlens=torch.tensor([0, 4, 4, 9]),
        )  # fmt: skip
        assert after is not None and after.isfinite().all()
        assert torch.equal(after[1], torch.zeros_like(after[1]) if start is None else start[1])


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
@torch.no_grad()
def test_gated_delta_rule(name: str) -> None:
    tensors, state = delta_inputs(2, 9), rand(2, 4, 8, 6)
    ours = getattr(gated_delta_rule, f"{name}_gated_delta_rule")
    theirs = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    q, k, v, g, beta = tensors
    for start in (None, state):
        more: dict[str, Any] = {
            "initial_state": start, "output_final_state": True, "use_qk_l2norm_in_kernel": True
        }  # fmt: skip
        found = ours(q, k, v, g=g, beta=beta, **more)
        close(found, theirs(*tensors, **more), 1e-4)
    packed = [t.flatten(0, 1)[None] for t in tensors]
    cu = torch.tensor([0, 9, 18])
    q, k, v, g, beta = packed
    more["initial_state"] = None
    out, last = ours(q, k, v, g=g, beta=beta, cu_seqlens=cu, **more)
    wanted, after = theirs(*tensors, **more)
    close(out, wanted.flatten(0, 1)[None], 1e-4)
    close(last, after, 1e-4)


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
@torch.no_grad()
def test_options_of_the_gated_delta_rule(name: str) -> None:
    """The decay from raw gates, the states transposed, beta from its logits, nothing rounded."""
    ours = getattr(gated_delta_rule, f"{name}_gated_delta_rule")
    q, k, v, g, beta = delta_inputs(2, 5)
    state, A_log, bias, wide = rand(2, 4, 8, 6), rand(4), rand(4), {"output_final_state": True}
    raw = {"use_gate_in_kernel": True, "A_log": A_log}
    for dt_bias in (None, bias):
        moved = g if dt_bias is None else g + dt_bias
        decay = (-A_log.double().exp() * softplus(moved.double())).float()
        wanted = ours(q, k, v, g=decay, beta=beta, initial_state=state, **wide)
        found = ours(q, k, v, g=g, beta=beta, initial_state=state, dt_bias=dt_bias, **raw, **wide)
        close(found, wanted)
    # Without use_gate_in_kernel fla reads neither.
    wanted = ours(q, k, v, g=g, beta=beta, initial_state=state, **wide)
    close(ours(q, k, v, g=g, beta=beta, initial_state=state, A_log=A_log, **wide), wanted)
    out, last = ours(q, k, v, g=g, beta=beta, initial_state=state.mT, state_v_first=True, **wide)
    close((out, last.mT), wanted)
    logits = torch.logit(beta / 2)
    more: dict[str, Any] = {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": True}
    close(ours(q, k, v, g=g, beta=logits, initial_state=state, **more, **wide), wanted, 1e-4)
    narrow = q.bfloat16()
    found = ours(narrow, k, v, g=g, beta=beta, initial_state=state, **wide)
    close(found, ours(narrow.float(), k, v, g=g, beta=beta, initial_state=state, **wide))


@pytest.mark.parametrize("name", ["chunk", "fused_recurrent"])
@torch.no_grad()
def test_what_the_gated_delta_rule_refuses(name: str) -> None:
    ours = getattr(gated_delta_rule, f"{name}_gated_delta_rule")
    q, k, v, g, beta = delta_inputs(1, 3)
    ours(q, k, v, g=g, beta=beta, head_first=False)
    for more, words in (
        ({"head_first": True}, "head_first is given"),
        ({"transpose_state_layout": True}, "transpose_state_layout is given"),
        ({"use_gate_in_kernel": True}, "A_log=None: use_gate_in_kernel=True needs it"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval=True needs use_beta_sigmoid"),
    ):
        with pytest.raises(PolyattnError, match=words):
            ours(q, k, v, g=g, beta=beta, **more)
    with pytest.raises(PolyattnError, match="g=None"):
        ours(q, k, v, g=None, beta=beta, use_gate_in_kernel=True, A_log=rand(4))


def test_what_is_refused() -> None:
    x, weight = rand(1, 6, 4), torch.nn.Parameter(rand(6, 4))
    with pytest.raises(PolyattnError, match="gradients are asked for"):
        causal_conv1d.causal_conv1d_fn(x, weight)
    with torch.no_grad(), pytest.raises(PolyattnError, match=r"\(6, 2\) is torch.complex64"):
        A, B = torch.ones(6, 2, dtype=torch.complex64), rand(1, 2, 4)  # mamba-ssm's S4D
        mamba1.selective_scan_fn(x, x, A, B, B)
    q, k, v, g, beta = delta_inputs(1, 3)
    with pytest.raises(PolyattnError, match="gradients are asked for"):
        gated_delta_rule.chunk_gated_delta_rule(q.requires_grad_(), k, v, g, beta)
    for name, gates in (("g", (None, beta)), ("beta", (g, None))):
        with pytest.raises(PolyattnError, match=rf"{name}=None: it must be \(1, 3, 4\)"):
            gated_delta_rule.chunk_gated_delta_rule(q, k, v, *gates)
    with torch.no_grad(), pytest.raises(PolyattnError, match="seq_idx beside initial_states"):
        causal_conv1d.causal_conv1d_fn(
            x, weight, seq_idx=torch.zeros(1, 4), return_final_states=True
        )
