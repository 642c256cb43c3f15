"""How close is right? The one table of tolerances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyattn.spec.layer import LayerSpec


@dataclass(frozen=True)
class Tolerance:
    """`output`: see `checking.compare`; `lse`: largest absolute difference, natural logarithm."""

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


FP8_COMPUTE = Tolerance(2.5e-1, 1.6e-1)
"""Where queries and weights are rounded to e4m3 too: half a unit in its last place is 6.25e-2. The
query's rounding moves a logit, the weight's the output, and the two add up in the worst row. A row over
many random values is as small as its error: of the kit's random steps the worst was off by 0.127 on an
H200 (1 query over 418 keys, 5/1 heads of 96), and by 0.197 in exact arithmetic on the rounded query (9
over 170, 4/1 heads of 128).

The LSE of a row of few keys moves as a logit does. Rounding moves each of its products by up to
6.25e-2 of itself, evenly: by 0.0265 in the root mean square, and so a logit of normal numbers at the
default scale, which is the sum of `head_size` of them, by as much of 1. Allowed are six of that, for a
step has 10^4 such rows: of 250 random steps of 4/2 heads with the query's rounding alone, all else in
float64, the worst row was off by 0.108, of 40 of 32/8 heads by 0.121."""


LATENT = 2.0
"""What MLA's tolerances are multiplied by: an absorbed query, `W_UK q`, is rounded to the layer's dtype
once more than an expanded one. In float64 with that one rounding alone, 300 random layers of 16 heads
(bf16, scale 0.7, logits up to 15) are off by up to 0.022, 3 % of them by more than 0.015. The LSE is
off by as much as a logit, which grows with their size, `scale * sqrt(head_size)`: there by up to 0.025
in bf16, where 0.016 would be allowed, and by 0.0033 in fp16."""


TURNED = {"bfloat16": 6 * math.sqrt(2) * 1.66e-3, "float16": 6 * math.sqrt(2) * 2.07e-4}
"""What the LSE of logits of 1 may be off by where cached keys are turned at each step, and the query
with them: both are rounded to the layer's dtype once more, which moves each product by 1.66e-3 of itself
(fp16 2.07e-4) for each of the two, in the root mean square. Allowed are six of that, as for
`FP8_COMPUTE`: in float64 with these roundings alone, the median of 60 random steps of up to 60 tokens, 16
heads of 32 turned whole, was off by 0.0044 and the worst by 0.0072 (fp16 0.0006, 0.0012), where 0.004
(0.003) would be allowed."""


FP8_OUTPUT = 6.25e-2
"""What an output in e4m3 may be off by beside: half a unit in its last place, of every element."""


def tolerance_of(spec: LayerSpec) -> Tolerance:
    """Return what a layer's results are held to."""
    found = FP8_COMPUTE if spec.fp8_compute else TOLERANCES[spec.dtype]
    if spec.recurrent is not None and spec.recurrent.state_dtype != "auto":
        kept = TOLERANCES[spec.recurrent.state_dtype]  # a state is rounded to it at each step
        found = Tolerance(max(found.output, kept.output), found.lse)
    if spec.out_dtype != "auto":
        found = Tolerance(found.output + FP8_OUTPUT, found.lse)
    if spec.rope is not None and spec.rope.positions == "cache" and spec.dtype in TURNED:
        turned = TURNED[spec.dtype] * spec.scale * math.sqrt(spec.rope.rotary_size)
        found = Tolerance(found.output, max(found.lse, turned))
    if spec.fp8_compute or spec.latent is None:
        return found
    logits = spec.scale * math.sqrt(spec.head_size)
    return Tolerance(LATENT * found.output, max(LATENT * LATENT * found.lse, found.output * logits))
