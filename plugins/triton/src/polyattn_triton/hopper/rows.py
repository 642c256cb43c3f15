"""What do the groups of `hopper.prefill` load and store? Their queries, their outputs, their parts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from polyattn_triton.hopper.names import async_load, barrier

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def load_query(q, Q, token0, query_len, start, head, q_t, q_h, G: gl.constexpr, D: gl.constexpr):
    """Copy a group's 64 (token, head) rows into shared memory, without waiting."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    offs = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    Q += (head * G).to(gl.int64) * q_h
    at = (token0 + row // G).to(gl.int64) * q_t + row % G * q_h
    async_load(
        q,
        Q + at[:, None] + offs[None, :],
        mask=(row < query_len * G)[:, None] & (offs < D)[None, :],
    )
    async_copy.commit_group()


@gluon.jit
def store_rows(
    acc, m, l, by, v_scale, OUT, LSE, q, token0, query_len, start, head, o_t, o_h, lse_t,
    G: gl.constexpr, D: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Store a group's rows, through the shared memory of its query: whole rows leave at once."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = m.type.layout
    safe = gl.where(l == 0.0, 1.0, l)
    out = acc * gl.convert_layout(v_scale / safe, gl.SliceLayout(1, acc.type.layout))[:, None]
    q.store(out.to(q.dtype))
    barrier()
    row = start + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    offs = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    OUT += (head * G).to(gl.int64) * o_h
    at = (token0 + row // G).to(gl.int64) * o_t + row % G * o_h
    gl.store(
        OUT + at[:, None] + offs[None, :],
        q.load(WIDE),
        mask=(row < query_len * G)[:, None] & (offs < D)[None, :],
    )
    if HAS_LSE:
        row = start + gl.arange(0, 64, layout=ROW)
        lse = gl.where(l == 0.0, float("-inf"), (m * by + gl.log2(safe)) * LN2)
        at = (token0 + row // G).to(gl.int64) * lse_t + head * G + row % G
        gl.store(LSE + at, lse, mask=row < query_len * G)


@gluon.jit
def store_part(acc, m, l, by, PARTS, PART_LSE, at, held, D: gl.constexpr):
    """Store a group's rows of a piece, normalised, with their LSE in base 2; `at`: the first's place."""
    OUTPUT: gl.constexpr = acc.type.layout
    safe = gl.where(l == 0.0, 1.0, l)
    out = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OUTPUT))[:, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, OUTPUT))
    offs = gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUT))
    to = (at + row).to(gl.int64) * D
    gl.store(
        PARTS + to[:, None] + offs[None, :], out, mask=(row < held)[:, None] & (offs < D)[None, :]
    )
    row = gl.arange(0, 64, layout=m.type.layout)
    lse = gl.where(l == 0.0, float("-inf"), m * by + gl.log2(safe))
    gl.store(PART_LSE + at + row, lse, mask=row < held)
