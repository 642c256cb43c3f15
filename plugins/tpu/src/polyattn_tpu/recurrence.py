"""Recurrences in XLA: chunks of tokens in matrix products, the state carried from chunk to chunk.

Mamba-2's and linear attention's chunks are after Dao and Gu (2024), the gated delta rule's after Yang et
al. (2024): within a chunk one triangular system, between chunks the state alone. Mamba-1 scans its
chunk associatively (Gu and Dao, 2023). All in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from polyattn.plugin import AttentionKind, BatchError, LayerSpec

from polyattn_tpu.planning import RecurrentPlan

Array = Any
Arrays = Mapping[str, Array]
LEAST = -1000.0
"""Of a log decay: e^-1000 is 0 in float32, and -inf would have no difference from itself."""


def recur(
    plan: RecurrentPlan, spec: LayerSpec, inputs: Arrays, params: Arrays, states: Array
) -> tuple[Array, Array]:
    """Run a step of a recurrence; returns the outputs and the states, each sequence's slot renewed.

    `inputs` (plan.num_tokens, …), `params` and `states` (slots, …) by the names and shapes of
    `polyattn.spec.recurrence`. Donate the states, so that they are written in place. Padding rows return
    arbitrary numbers. Call it inside `jax.jit`. Raises `BatchError`.
    """
    tokens = next(iter(inputs.values())).shape[0]
    if tokens != plan.num_tokens:
        raise BatchError(f"inputs have {tokens} rows; the plan takes {plan.num_tokens}: see pad()")
    chunk = CHUNKS[spec.kind]
    size = plan.take.shape[1]
    keeps = spec.kind is AttentionKind.SHORT_CONV
    wide = states.dtype if keeps else jnp.float32
    cut = {name: array[plan.take] for name, array in inputs.items()}
    slots = states.shape[0]
    # A slot of -1 becomes one past the end: it reads nothing and its write is dropped.
    slot = jnp.where(plan.slot < 0, slots, plan.slot)

    def begin(fresh: Array, at: Array, states: Array) -> Array:
        return jnp.where(fresh | (at >= slots), 0, states[jnp.minimum(at, slots - 1)]).astype(wide)

    if size == 1:  # single tokens: every chunk is a sequence of its own
        before = jax.vmap(begin, (0, 0, None))(plan.fresh, slot, states)
        run: Any = jax.vmap(lambda i, n, s: chunk(spec, i, params, n, s))
        out, after = run(cut, plan.count, before)
        # A padding row's slot is past the end; a chunk of padding has none either.
        states = states.at[slot].set(after.astype(states.dtype), mode="drop")
    else:

        def one(carry: tuple[Array, Array], x: Any) -> tuple[tuple[Array, Array], Array]:
            state, states = carry
            inputs, count, at, first, last, fresh = x
            state = jnp.where(first, begin(fresh, at, states), state)
            out, state = chunk(spec, inputs, params, count, state)
            where = jnp.where(last, at, slots)
            return (state, states.at[where].set(state.astype(states.dtype), mode="drop")), out

        state = jnp.zeros(states.shape[1:], wide)
        rows = (cut, plan.count, slot, plan.first, plan.last, plan.fresh)
        (_, states), out = lax.scan(one, (state, states), rows)
    dtype = jnp.dtype(spec.dtype)
    return out.reshape(-1, *out.shape[2:])[plan.put].astype(dtype), states


def einsum(form: str, *arrays: Array) -> Array:
    """Multiply in float32, as such."""
    return jnp.einsum(form, *arrays, precision=lax.Precision.HIGHEST)


def _real(count: Array, size: int) -> Array:
    return jnp.arange(size) < count


def _spread(array: Array, heads: int) -> Array:
    """Repeat groups (tokens, groups, size) to heads, in float32."""
    return jnp.repeat(array.astype(jnp.float32), heads // array.shape[1], axis=1)


def _masked(array: Array, count: Array) -> Array:
    """Return an array in float32 with zeros for tokens that aren't real, which may be anything."""
    real = _real(count, array.shape[0]).reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.where(real, array.astype(jnp.float32), 0.0)


def _decays(log: Array) -> tuple[Array, Array]:
    """Return what decays up to each token (tokens, heads), and of token j until i, 0 where j > i.

    Logarithms are summed as whole numbers, which float32 holds, and as what is left of them: sums whose
    difference is right after a token that forgets all.
    """
    log = jnp.maximum(log, LEAST)
    whole = jnp.round(log)
    total, rest = jnp.cumsum(whole, axis=0), jnp.cumsum(log - whole, axis=0)
    apart = (total[:, None] - total[None]) + (rest[:, None] - rest[None])
    size = log.shape[0]
    below = (jnp.arange(size)[:, None] >= jnp.arange(size)[None])[..., None]
    return jnp.exp(total + rest), jnp.where(below, jnp.exp(jnp.where(below, apart, 0.0)), 0.0)


def _decayed(q: Array, k: Array, v: Array, log: Array, state: Array) -> tuple[Array, Array]:
    """h_t = exp(log_t) h + k_t v_t'; o_t = q_t h_t. `state` (heads, K, V), the rest by token."""
    since, decay = _decays(log)
    scores = einsum("ihk,jhk->ijh", q, k) * decay
    out = einsum("ijh,jhv->ihv", scores, v)
    out = out + since[..., None] * einsum("ihk,hkv->ihv", q, state)
    state = since[-1][:, None, None] * state
    return out, state + einsum("jhk,jhv->hkv", k * decay[-1][..., None], v)


def _step_size(spec: LayerSpec, dt: Array, params: Arrays, count: Array) -> Array:
    assert spec.recurrent is not None
    dt = _masked(dt, count)
    if "dt_bias" in params:
        dt = dt + params["dt_bias"]
    dt = jax.nn.softplus(dt) if spec.recurrent.dt_softplus else dt
    return _masked(dt, count)


def _short_conv(
    spec: LayerSpec, x: Arrays, params: Arrays, count: Array, state: Array
) -> tuple[Array, Array]:
    assert spec.recurrent is not None
    width = spec.recurrent.conv_width
    tokens = x["x"]
    tokens = jnp.where(_real(count, tokens.shape[0])[:, None], tokens, 0)
    window = jnp.concatenate([state.T.astype(tokens.dtype), tokens])
    taps = [window[w : w + tokens.shape[0]].astype(jnp.float32) for w in range(width)]
    out = sum(tap * params["weight"][:, w] for w, tap in enumerate(taps))
    if "bias" in params:
        out = out + params["bias"]
    out = jax.nn.silu(out) if spec.recurrent.activation == "silu" else out
    # The last real tokens; padding doesn't shift them out.
    last = lax.dynamic_slice_in_dim(window, count, width - 1)
    return out, last.T.astype(state.dtype)


def _mamba1(
    spec: LayerSpec, x: Arrays, params: Arrays, count: Array, state: Array
) -> tuple[Array, Array]:
    dt = _step_size(spec, x["dt"], params, count)
    x_in, b, c = (_masked(x[name], count) for name in ("x", "B", "C"))
    decay = jnp.exp(dt[..., None] * params["A"])
    added = (dt * x_in)[..., None] * b[:, None]

    def both(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        return one[0] * two[0], one[1] * two[0] + two[1]

    decay, added = lax.associative_scan(both, (decay, added))
    states = decay * state + added
    out = einsum("tcn,tn->tc", states, c)
    return (out + params["D"] * x_in if "D" in params else out), states[-1]


def _mamba2(
    spec: LayerSpec, x: Arrays, params: Arrays, count: Array, state: Array
) -> tuple[Array, Array]:
    dt = _step_size(spec, x["dt"], params, count)
    x_in = _masked(x["x"], count)
    b, c = (_spread(_masked(x[name], count), spec.num_heads) for name in ("B", "C"))
    out, state = _decayed(c, b, dt[..., None] * x_in, dt * params["A"], state.transpose(0, 2, 1))
    out = out + params["D"][:, None] * x_in if "D" in params else out
    return out, state.transpose(0, 2, 1)


def _linear(
    spec: LayerSpec, x: Arrays, params: Arrays, count: Array, state: Array
) -> tuple[Array, Array]:
    q, k = (_spread(_masked(x[name], count), spec.num_heads) for name in ("q", "k"))
    v = _masked(x["v"], count)
    log = _masked(jnp.broadcast_to(params["decay"], v.shape[:2]), count)
    out, state = _decayed(q, k, v, log, state)
    return spec.scale * out, state


def _gdn(
    spec: LayerSpec, x: Arrays, params: Arrays, count: Array, state: Array
) -> tuple[Array, Array]:
    assert spec.recurrent is not None
    q, k = (_spread(_masked(x[name], count), spec.num_heads) for name in ("q", "k"))
    if spec.recurrent.qk_norm:
        q, k = (t * lax.rsqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
    v, g, beta = (_masked(x[name], count) for name in ("v", "g", "beta"))
    since, decay = _decays(g)
    size = v.shape[0]
    # What each token adds, u, depends on what those before it added: (I + M) u = beta (v - read).
    inner = einsum("ihk,jhk->ijh", k, k) * decay * beta[:, None]
    inner = jnp.where(jnp.eye(size, dtype=bool)[..., None], 0.0, inner)
    read = since[..., None] * einsum("ihk,hkv->ihv", k, state)
    right = beta[..., None] * (v - read)
    system = jnp.eye(size, dtype=inner.dtype) + inner.transpose(2, 0, 1)
    solve = jax.scipy.linalg.solve_triangular
    added = solve(system, right.transpose(1, 0, 2), lower=True, unit_diagonal=True)
    added = added.transpose(1, 0, 2)
    scores = einsum("ihk,jhk->ijh", q, k) * decay
    out = einsum("ijh,jhv->ihv", scores, added)
    out = out + since[..., None] * einsum("ihk,hkv->ihv", q, state)
    state = since[-1][:, None, None] * state
    return spec.scale * out, state + einsum("jhk,jhv->hkv", k * decay[-1][..., None], added)


CHUNKS = {
    AttentionKind.SHORT_CONV: _short_conv,
    AttentionKind.MAMBA1: _mamba1,
    AttentionKind.MAMBA2: _mamba2,
    AttentionKind.LINEAR: _linear,
    AttentionKind.GDN: _gdn,
}
"""What one chunk of a sequence does: (spec, inputs, params, real tokens, state) to (output, state)."""
