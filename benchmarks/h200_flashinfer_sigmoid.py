"""FlashSigmoid by FlashInfer's JIT: declared by hand as its documentation does, and as we generate it.

python benchmarks/h200_flashinfer_sigmoid.py compile|time [fa3] [fa2]

4 sequences of 4,096, 32/8 heads of 128, bf16, causal: its FA3 kernels (Hopper's) and its FA2 ones, over
pages of 16 and over keys as they lie, both declarations in turns. Each is a row of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import traceback
from typing import Any

import torch
from polyattn import Batch, LayerSpec
from polyattn.kernel import LayerParams
from polyattn_cuda.flashinfer_variants import Functions
from timing import kernel_us
from torch import Tensor

COUNT, LONG, HEADS, KV_HEADS, SIZE, BIAS = 4, 4096, 32, 8, 128, -8.3
TRANSFORM = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return math::ptx_rcp(1.f + math::ptx_exp2(-float(logits * scale_log2 + bias_log2)));
  });
"""
FA2 = (
    """
struct Sigmoid : AttentionVariantBase {
  static constexpr bool use_softmax = false;
  uint32_t window_left, qo_len, kv_len;
  float scale_log2, bias_log2;
  template <typename Params>
  __device__ __host__ Sigmoid(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    scale_log2 = params.logits_scale * math::log2e;
    bias_log2 = params.sigmoid_bias * math::log2e;
  }
"""
    + TRANSFORM
    + """
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return output;
  });
};
"""
)
FA3 = (
    """
struct Sigmoid : AttentionVariantBase {
  float scale_log2, bias_log2;
  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ Sigmoid(const MainloopParams& params, const BlockCoord& block_coord) {
    scale_log2 = params.additional_params.logits_scale * math::log2e;
    bias_log2 = params.additional_params.sigmoid_bias * math::log2e;
  }
  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() { return DefaultUpdater<NUM_ROWS_PER_THREAD>(); }
"""
    + TRANSFORM
    + """
};
"""
)


def arguments(kernels: str) -> list[Any]:
    """What the wrappers' `jit_args` are."""
    kind = torch.bfloat16
    return [
        f"polyattn_benchmark_sigmoid_{kernels}", kind, kind, kind, torch.int32, SIZE, SIZE, [], [],
        ["logits_scale", "sigmoid_bias"], ["double", "double"], "Sigmoid",
        FA2 if kernels == "fa2" else FA3,
    ]  # fmt: skip


def generated() -> Functions:
    """What FLASHINFER makes of the shipped variant."""
    spec = LayerSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="bfloat16", variant="flash_sigmoid"
    )  # fmt: skip
    found = Functions.of(spec, torch.device("cuda"))
    assert found is not None
    return found


def numbers(by_hand: bool) -> tuple[Any, ...]:
    """What a declaration's kernels are given beside queries and keys."""
    if by_hand:
        return SIZE**-0.5, BIAS
    batch = Batch.from_lens([LONG] * COUNT, [LONG] * COUNT, device="cuda")
    params = LayerParams(inputs={"sigmoid_bias": torch.tensor(BIAS, device="cuda")})
    return generated().given(batch, params)


def wrapper(kernels: str, paged: bool, by_hand: bool) -> Any:
    """A planned wrapper of FlashInfer's."""
    import flashinfer

    jit = arguments(kernels) if by_hand else generated().jit_args(kernels)
    buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    starts = torch.arange(COUNT + 1, dtype=torch.int32) * LONG
    kind = torch.bfloat16
    if paged:
        made = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            buffer, "NHD", backend=kernels, jit_args=jit
        )
        pages = torch.arange(COUNT * LONG // 16, dtype=torch.int32, device="cuda")
        last = torch.full((COUNT,), 16, dtype=torch.int32)
        made.plan(starts, starts // 16, pages, last, HEADS, KV_HEADS, SIZE, 16, causal=True,
                  q_data_type=kind, kv_data_type=kind)  # fmt: skip
        return made
    made = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        buffer, "NHD", backend=kernels, jit_args=jit
    )
    made.plan(
        starts, starts, HEADS, KV_HEADS, SIZE, causal=True, q_data_type=kind, kv_data_type=kind
    )
    return made


def expected(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The first sequence's last row of all heads, in float64."""
    q, k, v = query[LONG - 1].double(), keys[:LONG].double(), values[:LONG].double()
    group = HEADS // KV_HEADS
    scores = torch.einsum("hd,khd->hk", q, k.repeat_interleave(group, 1)) * SIZE**-0.5
    return torch.einsum("hk,khd->hd", torch.sigmoid(scores + BIAS), v.repeat_interleave(group, 1))


def measure(kernels: str, paged: bool) -> list[dict[str, Any]]:
    """Both declarations, checked, then timed in turns."""
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(COUNT * LONG, HEADS, SIZE, **kind)  # type: ignore[call-overload]
    keys = torch.randn(COUNT * LONG, KV_HEADS, SIZE, **kind)  # type: ignore[call-overload]
    values = torch.randn_like(keys)
    given: tuple[Any, ...] = (keys, values)
    if paged:
        given = ((keys.view(-1, 16, KV_HEADS, SIZE), values.view(-1, 16, KV_HEADS, SIZE)),)
    wanted = expected(query, keys, values)
    calls, errors = {}, {}
    for by_hand in (True, False):
        run, more = wrapper(kernels, paged, by_hand), numbers(by_hand)

        def call(run: Any = run, more: tuple[Any, ...] = more) -> Tensor:
            found: Tensor = run.run(query, *given, *more)
            return found

        calls[by_hand] = call
        errors[by_hand] = float(
            (call()[LONG - 1].double() - wanted).abs().max() / wanted.abs().max()
        )
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(3):
        for by_hand, call in calls.items():
            times[by_hand].append(kernel_us(call, 10))
    where = "paged" if paged else "ragged"
    return [
        {
            "row": f"FlashInfer's JIT, FlashSigmoid {how}, {kernels} {where}",
            "us": round(statistics.median(times[by_hand]), 1),
            "error": float(f"{errors[by_hand]:.2g}"), "right": errors[by_hand] < 2e-2,
            "first_s": 0, "plan_ms": 0,
        }
        for by_hand, how in ((True, "by hand"), (False, "generated"))
    ]  # fmt: skip


def main() -> None:
    for kernels in sys.argv[2:] or ["fa3"]:
        for paged in (True, False):
            try:
                if sys.argv[1] == "compile":
                    for by_hand in (True, False):
                        wrapper(kernels, paged, by_hand)
                    print(kernels, "compiled", flush=True)
                    break  # one module holds both
                for row in measure(kernels, paged):
                    print(json.dumps(row), flush=True)
            except Exception as error:
                traceback.print_exc()
                name = f"FlashInfer's JIT, FlashSigmoid, {kernels} {'paged' if paged else 'ragged'}"
                print(json.dumps({"row": name, "failed": str(error)[-300:]}), flush=True)


if __name__ == "__main__":
    main()
