"""Are the bits of `batch_invariant="machines"` those that the page specifies, whatever computes them?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import interpreted
from polyattn import LayerGroup, LayerSpec, select
from polyattn.errors import SelectionError, SpecError
from polyattn.families.attention import reference, specified
from polyattn.runtime.program import LayerParams
from polyattn.spec.rope import RopeSpec
from polyattn.workload.base import workload
from polyattn_cpu.native.attention import NativeAttention
from polyattn_cpu.native.library import isas

SPEC = LayerSpec(
    num_heads=2, num_kv_heads=1, head_size=6, v_head_size=5, dtype="float32", needs_lse=True,
    learned_sinks=True, alibi=True, batch_invariant="machines",
)  # fmt: skip
F = np.float32


def exponential(x: F) -> F:
    """e^x, as docs/invariance.md has it."""
    if x < F(-86):
        return F(0)
    n = (x * F(float.fromhex("0x1.715476p+0")) + F(12582912)) - F(12582912)
    r = (x - n * F(0.693359375)) - n * F(float.fromhex("-0x1.bd0106p-13"))
    y = F(float.fromhex("0x1.6a23cep-10"))
    for c in ("0x1.123a2p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2", "1", "1"):
        y = y * r + F(float.fromhex(c))
    return y * F(2.0 ** int(n))


def logarithm(x: F) -> F:
    """ln(x), as docs/invariance.md has it."""
    n = math.frexp(x)[1]
    f = x * F(2.0**-n)
    if f < np.uint32(0x3F3504F3).view(F):
        n, f = n - 1, f * F(2)
    t = (f - F(1)) / (f + F(1))
    z = t * t
    y = F(float.fromhex("0x1.c71c72p-3"))
    for c in ("0x1.24924ap-2", "0x1.99999ap-2", "0x1.555556p-1"):
        y = y * z + F(float.fromhex(c))
    return F(n) * F(0.693359375) + (
        F(n) * F(float.fromhex("-0x1.bd0106p-13")) + (t * (y * z) + (t + t))
    )


def joined(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    m = max(a[0], b[0])
    p, q = exponential(a[0] - m), exponential(b[0] - m)
    return m, a[1] * p + b[1] * q, [x * p + y * q for x, y in zip(a[2], b[2], strict=True)]


def one_row(q: Any, keys: Any, values: Any, scale: float, slope: F, position: int, sink: F) -> Any:
    """Return the output and the LSE of one query at `position`, one number at a time."""
    whole = None
    for segment in range(0, position + 1, 256):
        part = None
        for block in range(segment, min(segment + 256, position + 1), 32):
            seen = range(block, min(block + 32, position + 1))
            scores = []
            for key in seen:
                sums = [F(0)] * 4
                for d in range(len(q)):
                    sums[d % 4] = sums[d % 4] + q[d] * keys[key][d]
                dot = (sums[0] + sums[1]) + (sums[2] + sums[3])
                scores.append(dot * F(scale) + slope * F(key - position))
            m = max(scores) if part is None else max(part[0], *scores)
            by = F(0) if part is None else exponential(part[0] - m)
            total, sums = (F(0), [F(0)] * len(values[0])) if part is None else part[1:]
            total, sums = total * by, [x * by for x in sums]
            for key, score in zip(seen, scores, strict=True):
                weight = exponential(score - m)
                total = total + weight
                sums = [x + weight * v for x, v in zip(sums, values[key], strict=True)]
            part = m, total, sums
        whole = joined(whole, part)
    m, total, sums = joined(whole, (sink, F(1), [F(0)] * len(values[0])))
    return [x / total for x in sums], m + logarithm(total)


@pytest.mark.parametrize("keys", [1, 4, 32, 33, 256, 257, 300])
def test_the_page_one_number_at_a_time_gives_the_bits_of_the_operators(keys: int) -> None:
    torch.manual_seed(keys)
    query, key, value = (
        torch.randn(n, h, d) for n, h, d in ((3, 2, 6), (keys, 1, 6), (keys, 1, 5))
    )
    query, count = query[: min(3, keys)], min(3, keys)
    params = LayerParams(sinks=torch.randn(2), alibi_slopes=torch.rand(2))
    mask = reference.visible(SPEC, count, keys)
    out, lse = specified.attend(SPEC, query, key, value, params, keys - count, mask)
    assert params.sinks is not None and params.alibi_slopes is not None
    for row in range(count):
        for head in range(2):
            of_head = (
                params.alibi_slopes[head].numpy(),
                keys - count + row,
                params.sinks[head].numpy(),
            )
            tokens = query[row, head].numpy(), key[:, 0].numpy(), value[:, 0].numpy()
            found, its = one_row(*tokens, SPEC.scale, *of_head)
            assert out[row, head].tolist() == [float(x) for x in found]
            assert float(lse[row, head]) == float(its)
    expected, its_lse = reference.attend(SPEC, query, key, value, params)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), its_lse, rtol=0, atol=4e-6)


def test_both_functions_are_right_to_two_units_of_the_last_place() -> None:
    x = torch.cat([torch.rand(100_000) * -86, torch.tensor([0.0, -86.0, -1e-30, -0.34657])])
    assert error(specified.exponential(x), x.double().exp()) < 2**-22
    ends = torch.tensor([0.0, -86.01, -torch.inf])
    assert specified.exponential(ends).tolist() == [1.0, 0.0, 0.0]
    x = torch.cat([1 + torch.rand(200_000) ** 9 * 1e6, torch.tensor([1.0, 2.0, 2.0**40])])
    assert error(specified.logarithm(x), x.double().log()) < 2**-22


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact) / exact.abs().clamp(min=1e-37)).abs().max())


def alike(spec: LayerSpec, backend: str) -> None:
    """Assert that a backend has the bits of the operators."""
    for mine, its in zip(step(spec, backend), step(spec, "VANILLA"), strict=True):
        assert torch.equal(mine.view(torch.int32), its.view(torch.int32)), spec


LAYERS: tuple[dict[str, Any], ...] = (
    {"v_head_size": 72, "causal": False, "alibi": False},
    {"head_size": 40, "sliding_window": 40, "sink_tokens": 3},
)


@pytest.mark.parametrize("isa", isas())
def test_each_instruction_set_has_the_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = NativeAttention.plan

    def plan(self: Any, *args: Any) -> Any:
        self.by = isa
        return planned(self, *args)

    monkeypatch.setattr(NativeAttention, "plan", plan)
    for fields in (*LAYERS, {"head_size": 35, "v_head_size": 3}):
        alike(
            SPEC.replace(num_heads=6, num_kv_heads=2, **{"head_size": 64} | fields), "NATIVE_ATTN"
        )


def step(spec: LayerSpec, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of a random step of a chunk, decodes and a prompt."""
    group = LayerGroup(select(spec, "cpu", backend=backend))
    of_sequences = [(7, 300), (1, 513), (1, 32), (40, 40)]
    return workload(group, of_sequences, 3).call()  # type: ignore[no-any-return]


def test_triton_s_kernel_has_the_bits() -> None:
    assert interpreted(__file__) == "alike\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"logit_soft_cap": 30.0},
        {"rope": RopeSpec(rotary_size=64)},
        {"mask": "custom"},
        {"variant": "relative_bias"},
    ],
)
def test_what_has_no_specified_bits_is_refused_by_name(fields: dict[str, Any]) -> None:
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", batch_invariant="calls"
    )
    name = next(iter(fields))
    with pytest.raises(SpecError, match=f"'machines': bits are specified for {name}=.*'calls'"):
        spec.replace(batch_invariant="machines", **fields)


def test_who_has_the_bits_is_chosen_and_all_others_are_refused() -> None:
    spec = LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", batch_invariant="machines"
    )
    for device, name in (
        ("cpu", "NATIVE_ATTN"),
        ("h200", "TRITON_ATTN"),
        ("mi300x", "TRITON_ATTN"),
    ):
        decision = select(spec, device).decision
        assert (decision.prefill, decision.decode) == (name, name)
    with pytest.raises(SelectionError, match="machine_invariant.*ask for batch_invariant='calls'"):
        select(spec, "cpu", backend="TORCH_SDPA")
    with pytest.raises(SelectionError, match="its tiles are listed for each step"):
        select(spec.replace(graph_capture="single_token_decode"), "h200")


if __name__ == "__main__":  # by `interpreted`
    for more in LAYERS:
        alike(SPEC.replace(**{"head_size": 64, "v_head_size": 56} | more), "TRITON_ATTN")
    print("alike")
