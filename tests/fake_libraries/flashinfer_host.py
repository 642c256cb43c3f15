"""What FlashInfer does with a custom mask, and with a declaration: compiled for the host by g++."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INFINITY = 5e4
"""FlashInfer's own: finite, so that it may be subtracted from itself."""
ELEMENTS = {
    "float": torch.float32, "int32_t": torch.int32, "int64_t": torch.int64, "uint8_t": torch.bool,
}  # fmt: skip
AROUND = """
#include <cmath>
#include <cstdint>
#include <tuple>
template <int N, bool SCALED> struct OnlineSoftmax {{ OnlineSoftmax(float) {{}} }};
template <int N> struct DefaultUpdater {{}};
#define __device__
#define __host__
#define REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, \\
                                  kv_head_idx, ...) \\
  template <typename Params, typename T> T LogitsTransform(const Params& params, T logits, \\
    uint32_t batch_idx, uint32_t qo_idx, uint32_t kv_idx, uint32_t qo_head_idx, uint32_t kv_head_idx) \\
  {{ __VA_ARGS__ }}
#define REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, ...) \\
  template <typename Params, typename T> T OutputTransform(const Params& params, T output, \\
    uint32_t batch_idx, uint32_t qo_idx, uint32_t qo_head_idx, float m, float d, float scale) \\
  {{ __VA_ARGS__ }}
namespace math {{
constexpr float inf = 5e4f;
constexpr float log2e = 1.44269504088896340736f;
static inline float ptx_exp2(float x) {{ return std::exp2(x); }}
static inline float ptx_rcp(float x) {{ return 1.f / x; }}
}}
template <typename T> T __ldg(const T* at) {{ return *at; }}
static inline float rsqrtf(float x) {{ return 1.f / std::sqrt(x); }}
struct AttentionVariantBase {{}};
{declaration}
struct Additional {{ {fields} }};
struct Params : Additional {{
  int32_t window_left;
  uint32_t qo_len, kv_len;
  Additional additional_params;
  uint32_t get_qo_len(uint32_t) const {{ return qo_len; }}
  uint32_t get_kv_len(uint32_t) const {{ return kv_len; }}
}};
extern "C" int transform(void** tensors, double* doubles, int64_t* integers, int window_left,
                         uint32_t batch, uint32_t qo_len, uint32_t kv_len, uint32_t heads,
                         uint32_t group, float* logits) {{
  Additional given{{ {values} }};
  Params params{{given, window_left, qo_len, kv_len, given}};
  {made}
  for (uint32_t h = 0; h < heads; h++)
    for (uint32_t q = 0; q < qo_len; q++)
      for (uint32_t k = 0; k < kv_len; k++, logits++)
        *logits = variant.LogitsTransform(params, *logits, batch, q, k, h, h / group);
  return {softmax};
}}
"""


@cache
def compiled(
    name: str, declaration: str, tensors: tuple[tuple[str, str], ...],
    numbers: tuple[tuple[str, str], ...],
) -> Callable[..., int]:  # fmt: skip
    """Compile a declaration; what is returned changes logits (heads, queries, keys) in place."""
    fields = [f"{kind}* {field};" for field, kind in tensors]
    fields += [f"{kind} {field};" for field, kind in numbers]
    values = [f"({kind}*)tensors[{i}]" for i, (_, kind) in enumerate(tensors)]
    doubles = [field for field, kind in numbers if kind == "double"]
    integers = [field for field, kind in numbers if kind == "int64_t"]
    for field, kind in numbers:
        of, names = ("doubles", doubles) if kind == "double" else ("integers", integers)
        values.append(f"{of}[{names.index(field)}]")
    fa3 = "GetAttentionUpdater" in declaration
    softmax = str("OnlineSoftmax<" in declaration).lower() if fa3 else f"{name}::use_softmax"
    made = f"{name} variant(params, batch, nullptr);"
    if fa3:  # tile, heads, starts, lengths, sequence
        made = f"{name} variant(params, std::make_tuple(0, 0, 0, 0, 0, qo_len, kv_len, batch));"
    source = AROUND.format(
        declaration=declaration, fields=" ".join(fields), values=", ".join(values), made=made,
        softmax=softmax,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    (folder / "variant.cpp").write_text(source)
    made = subprocess.run(
        ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "variant.so", "variant.cpp"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    function: Callable[..., int] = ctypes.CDLL(str(folder / "variant.so")).transform
    function.argtypes = [  # type: ignore[attr-defined]
        *[ctypes.c_void_p] * 3, ctypes.c_int, *[ctypes.c_uint32] * 5,
        ctypes.c_void_p,
    ]  # fmt: skip
    return function


def attend(
    wrapper: Any, args: tuple[Any, ...], query: Tensor, keys: list[Tensor], values: list[Tensor],
    starts: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend for each sequence as FlashInfer does, in blocks of all keys; LSE (heads, tokens), base e."""
    planned, made = wrapper.planned, wrapper.made
    out, lses = [], []
    bits, at = planned["custom_mask"], 0
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        q = query[starts[index] : starts[index + 1]].double()
        count, length, group = len(q), len(key), q.shape[1] // key.shape[1]
        logits = torch.einsum("qhd,khd->hqk", q, key.double().repeat_interleave(group, 1))
        softmax = True
        if made.get("jit_args"):
            logits = logits.float().contiguous()
            softmax = _transform(made["jit_args"], args, planned, index, logits, group)
            logits = logits.double()
        else:
            logits = logits * planned["sm_scale"]
            cap = planned["logits_soft_cap"] or 0.0
            logits = cap * torch.tanh(logits / cap) if cap else logits
        place = torch.arange(count)[:, None] + length - count
        seen = torch.ones(count, length, dtype=torch.bool)
        if bits is not None:
            assert planned["window_left"] == -1 and not planned["causal"]
            seen = bits[at : at + count * length].view(count, length)
            at += count * length
        elif planned["causal"]:
            seen = torch.arange(length) <= place
        logits = logits.masked_fill(~seen, -INFINITY if softmax else 0.0)
        wide = value.double().repeat_interleave(group, 1)
        if not softmax:
            out.append(torch.einsum("hqk,khd->qhd", logits, wide))
            lses.append(torch.zeros(q.shape[1], count))
            continue
        top = logits.amax(2) if length else logits.new_full(logits.shape[:2], -INFINITY)
        weights = torch.exp(logits - top[..., None])
        total = weights.sum(2)
        found = torch.einsum("hqk,khd->hqd", weights, wide) / total.clamp(min=1e-30)[..., None]
        out.append(found.masked_fill((top == -INFINITY)[..., None], 0.0).transpose(0, 1))
        lses.append(top + total.log())
    assert bits is None or at == len(bits)
    return torch.cat(out).to(query.dtype), torch.cat(lses, 1)


def _transform(
    jit: list[Any], args: tuple[Any, ...], planned: dict[str, Any], index: int, logits: Tensor,
    group: int,
) -> bool:  # fmt: skip
    _, *kinds = jit[:7]
    assert kinds[:3] == [planned["q_data_type"]] * 3 and kinds[3] is torch.int32
    tensors, numbers, name, declaration = jit[7:9], jit[9:11], jit[11], jit[12]
    pointers, given = args[: len(tensors[0])], args[len(tensors[0]) :]
    assert len(given) == len(numbers[0])
    for tensor, kind in zip(pointers, tensors[1], strict=True):
        assert tensor.dtype is ELEMENTS[kind]
    split = {k: [n for n, t in zip(given, numbers[1], strict=True) if t == k] for k in numbers[1]}
    heads, queries, keys = logits.shape
    return bool(
        compiled(name, declaration, *(tuple(zip(*names, strict=True)) for names in (tensors, numbers)))(
            (ctypes.c_void_p * len(pointers))(*(t.data_ptr() for t in pointers)),
            (ctypes.c_double * 2)(*split["double"]),
            (ctypes.c_int64 * len(given))(*split.get("int64_t", [])),
            planned["window_left"], index, queries, keys, heads, group, logits.data_ptr(),
        )
    )  # fmt: skip
