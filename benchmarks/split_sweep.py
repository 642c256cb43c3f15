"""How many splits does decode want? Times TRITON_ATTN's attention alone over splits and tiles.

python benchmarks/split_sweep.py
"""

from __future__ import annotations

from typing import Any

import torch
from polyattn import LayerSpec, select
from polyattn.cli.benching import Step
from polyattn_triton.configs import Config
from timing import host_us, kernel_us

SPEC = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)


def main() -> None:
    nothing = torch.empty(1, device="cuda")
    print(f"an empty kernel: {kernel_us(lambda: nothing.zero_()):.1f} us")
    for shape in ((1, 8192), (4, 8192), (16, 4096), (64, 4096)):
        selection = select(SPEC, "cuda", backend="TRITON_ATTN")
        step = Step(selection, [1] * shape[0], [shape[1]] * shape[0], torch.device("cuda"))
        step.run()
        backend: Any = selection.runtime.decode
        found = []
        for early in (False, True):
            for splits in (1, 2, 4, 8, 16, 32, 64):
                if not 32 <= splits * shape[0] * 8 <= 2048:
                    continue
                for config in ((16, 32, 2, 3), (16, 32, 4, 4), (16, 64, 2, 2), (16, 64, 4, 2),
                               (16, 64, 4, 3), (16, 128, 4, 2), (16, 128, 8, 2)):  # fmt: skip
                    backend.early = early
                    backend.decode_config = Config(*config)
                    backend.splits = splits
                    backend._sites.clear()
                    rows = shape[0] * 32 * splits
                    backend._parts = torch.empty(rows * 128, device="cuda")
                    backend._part_lse = torch.empty(rows, device="cuda")

                    def run() -> None:
                        step.layer(step.query, None, None, step.cache, step.batch, out=step.out)  # noqa: B023

                    try:
                        found.append((kernel_us(run, repeats=9), early, splits, config))
                    except Exception as error:
                        print(early, splits, config, str(error)[:100])
        found.sort()
        print(shape)
        for row in found[:5] + [r for r in found if not r[1]][:3]:
            print(f"   {row[0]:.1f} us, early {row[1]}, splits {row[2]}, {row[3]}", flush=True)
        print(f"   host {host_us(run):.1f} us")


if __name__ == "__main__":
    main()
