"""How close is right? The one table of tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyattn.runtime.cache.kv_cache import storage_dtype
from polyattn.runtime.cache.rows import exact_in
from polyattn.spec.layer import LayerSpec
from polyattn.spec.row_format import is_rows, rows_of


@dataclass(frozen=True)
class Tolerance:
    """`output`: see `workload.compare`; `lse`: largest absolute difference, natural logarithm."""

    output: float
    lse: float


TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 5e-6),
    "float32": Tolerance(2e-5, 1e-4),
    "bfloat16": Tolerance(1.5e-2, 4e-3),
    "float16": Tolerance(3e-3, 3e-3),
}
"""By the layer's dtype. The inputs, a quantised cache included, are what the reference reads too,
so only the backend's own rounding counts: half a unit in the last place of bf16 is 3.9e-3, of
fp16 4.9e-4, and a kernel rounds the weights and the output. The LSE is float32 by contract, whatever
the dtype."""


SIGMAS = 6.0
"""How many root mean squares of a rounding a row may be off by: a step has 10^4 rows."""
E4M3 = 2**-4 * math.sqrt(1 / (8 * math.log(2)))
"""The relative error of rounding to e4m3, as a root mean square: 0.0265. Half a unit in the
last place is 2^-4 of the power of two below a number. An error is anything up to that (1/sqrt(3) of
it), and a mantissa m is as frequent as 1/m (the mean of 1/m^2 is 3/(8 ln 2))."""


def fp8_compute(spec: LayerSpec) -> Tolerance:
    """Return the tolerance of a layer that rounds queries and weights to e4m3 as well.

    A logit is `scale` times a sum of `head_size` products, and the query's rounding moves each of them by
    `E4M3` of itself: the logit of normal numbers by `E4M3 * scale * sqrt(head_size)`, which is `E4M3` at
    the default scale. The LSE of a row of few keys moves as its logits do. A weight moves by what its
    logit does and by its own rounding, together e of itself, and the row `sum(w v)` of random values by
    `sqrt(sum(w^2 (e - mean)^2) / sum(w^2))` of itself. Of that a row which two keys share has the widest
    tail: `|e1 - e2| / 2`, `1 / sqrt(2)` of an e.

    In float64 with these two roundings alone, the worst of 1,800 random steps (32 to 128 a head, scales
    of up to 0.4) was off by 0.80 of what is allowed in the output and by 0.95 in the LSE.
    """
    plain, logits = TOLERANCES[spec.dtype], spec.scale * math.sqrt(spec.head_size)
    moved = SIGMAS * E4M3
    output = plain.output + moved / math.sqrt(2) * math.hypot(1.0, logits)
    return Tolerance(output, plain.lse + moved * logits)


ROUNDED = {"bfloat16": 1.66e-3, "float16": 2.07e-4, "float32": 2.5e-8}
"""The relative error of rounding to a dtype, as a root mean square, computed like `E4M3`: half a unit
in the last place of a power of two, times `sqrt(1 / (8 ln 2))`."""


def of_rows(spec: LayerSpec) -> tuple[float, float]:
    """Return what output and LSE may be off by beside, where the layer's dtype can't hold cached rows.

    A kernel rounds what `decode` returns to the dtype that it multiplies in: keys move logits, and values
    the output, as queries and weights do in `fp8_compute`. Whether the dtype holds them is tried.
    """
    sizes = (spec.head_size, spec.v_head_size)
    if spec.latent is not None:
        sizes = (spec.latent.size, spec.latent.size)
    formats = rows_of(spec.kv_cache_dtype)
    dtype = storage_dtype(spec.dtype)
    if all(exact_in(each, size, dtype) for each, size in zip(formats, sizes, strict=True)):
        return 0.0, 0.0
    moved = SIGMAS * ROUNDED.get(spec.dtype, 0.0)
    logits = spec.scale * math.sqrt(spec.head_size)
    return moved / math.sqrt(2) * math.hypot(1.0, logits), moved * logits


LATENT = 2.0
"""What MLA's tolerances are multiplied by: an absorbed query, `W_UK q`, is rounded to the layer's dtype
once more than an expanded one. In float64 with that one rounding alone, 300 random layers of 16 heads
(bf16, scale 0.7, logits up to 15) are off by up to 0.022, 3 % of them by more than 0.015. The LSE is
off by as much as a logit, which grows with their size, `scale * sqrt(head_size)`: there by up to 0.025
in bf16, where 0.016 would be allowed, and by 0.0033 in fp16."""


TURNED = {"bfloat16": SIGMAS * math.sqrt(2) * 1.66e-3, "float16": SIGMAS * math.sqrt(2) * 2.07e-4}
"""What the LSE of logits of 1 may be off by where cached keys are turned at each step, and the query
with them: both are rounded to the layer's dtype once more, which moves each product by 1.66e-3 of itself
(fp16 2.07e-4) for each of the two, in the root mean square. Allowed are `SIGMAS` of that: in float64
with these roundings alone, the median of 60 random steps of up to 60 tokens, 16 heads of 32 turned whole,
was off by 0.0044 and the worst by 0.0072 (fp16 0.0006, 0.0012), where 0.004 (0.003) would be allowed."""


FP8_OUTPUT = 6.25e-2
"""What an output in e4m3 may be off by beside: half a unit in its last place, of every element."""


TANH = 2.0**-11
"""By how much of itself a tanh may be off: the most that PTX states for `tanh.approx.f32`, which caps
logits (docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-tanh). On Turing all
float32 are within 1.2e-5 (forums.developer.nvidia.com/t/hardware-accelerated-tanh-on-turing/173291)."""


def of_sum(spec: LayerSpec, offset: float) -> float:
    """Return by how much a logit near `offset` is off, summed product by product in float32.

    In the root mean square: each of `head_size` sums is rounded to its nearest number, which moves it by
    up to half a unit in the last place, evenly.
    """
    _, exponent = math.frexp(offset / spec.scale)
    return spec.scale * math.ldexp(1.0, exponent - 24) * math.sqrt(spec.head_size / 12)


def tolerance_of(spec: LayerSpec, offset: float = 0.0) -> Tolerance:
    """Return the tolerance of a layer's results. `offset`: all logits lie near it.

    A row that two keys share moves by half the difference of its logits' errors, as in `fp8_compute`. In
    300 random steps, heads of 64 and an offset of 100, a kernel that adds product after product in
    float32 was off by up to 4.9e-5 (median 2.8e-5), where 2e-5 would be allowed without, and 9.5e-5 is.
    """
    tolerance = _of_layer(spec)
    if not offset or spec.dtype == "float64":
        return tolerance
    moved = SIGMAS * of_sum(spec, offset) + (spec.logit_soft_cap or 0.0) * TANH
    return Tolerance(tolerance.output + moved / math.sqrt(2), tolerance.lse + moved)


def _of_layer(spec: LayerSpec) -> Tolerance:
    limit = fp8_compute(spec) if spec.fp8_compute else TOLERANCES[spec.dtype]
    if spec.recurrent is not None and spec.recurrent.state_dtype != "auto":
        of_state = TOLERANCES[spec.recurrent.state_dtype]  # a state is rounded to it at each step
        limit = Tolerance(max(limit.output, of_state.output), limit.lse)
    if spec.out_dtype != "auto":
        limit = Tolerance(limit.output + FP8_OUTPUT, limit.lse)
    if spec.rope is not None and spec.rope.positions == "cache" and spec.dtype in TURNED:
        turned = TURNED[spec.dtype] * spec.scale * math.sqrt(spec.rope.rotary_size)
        limit = Tolerance(limit.output, max(limit.lse, turned))
    if is_rows(spec.kv_cache_dtype):
        output, lse = of_rows(spec)
        limit = Tolerance(limit.output + output, limit.lse + lse)
    if spec.fp8_compute or spec.latent is None:
        return limit
    logits = spec.scale * math.sqrt(spec.head_size)
    return Tolerance(LATENT * limit.output, max(LATENT * LATENT * limit.lse, limit.output * logits))
