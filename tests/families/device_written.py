"""A source by hand on a backend and a device: right, and a lie refused where the backend is verified."""

from __future__ import annotations

import sys

import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, register_variant, select
from polyattn.errors import SelectionError
from polyattn.families.attention import reference
from polyattn.runtime.program import LayerParams
from polyattn.workload.compare import output_error
from polyattn.workload.pages import fill
from polyattn.workload.tolerance import tolerance_of
from written_by_hand import HONEST, LYING, given

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="bfloat16", block_size=16)


def main(backend: str, device: str) -> None:
    for variant in (HONEST, LYING):
        register_variant(variant)
    generator = torch.Generator().manual_seed(1)
    spec = SPEC.replace(variant="bent")
    group = LayerGroup(select(spec, device, backend=backend))
    inputs = {name: tensor.to(device) for name, tensor in given(3).items()}
    step = {"reach": inputs.pop("reach")}
    layer, cache = Attention(group, inputs=inputs), group.allocate_cache(9)
    fill(cache, generator)
    table = torch.randperm(9, generator=generator).int().view(3, 3).to(device)
    for lens in (([20, 7, 1], [33, 40, 12]), ([1, 1, 1], [33, 40, 12])):
        batch = Batch.from_lens(*lens, table, 16, inputs=step)
        new = [
            torch.randn(sum(lens[0]), heads, 64, generator=generator).bfloat16().to(device)
            for heads in (4, 2, 2)
        ]
        with torch.no_grad():
            out = layer(*new, cache, batch)
        assert isinstance(out, torch.Tensor)
        on_host = Batch.from_lens(*lens, table.cpu(), 16, inputs={"reach": step["reach"].cpu()})
        params = LayerParams(inputs={name: tensor.cpu() for name, tensor in inputs.items()})
        held = type(cache)(cache.key.cpu(), cache.value.cpu(), cache.format)
        expected, _ = reference.forward(spec, new[0].cpu(), None, None, held, on_host, params)
        error = output_error(out.cpu(), expected)
        assert error <= tolerance_of(spec).output, error
    try:
        select(SPEC.replace(variant="bent_lie"), device, backend=backend, verify=True)
    except SelectionError as refused:
        assert "its output is wrong" in str(refused), refused
        print("right, and a lie is refused")
        return
    print("WRONG: a lie was not caught")


if __name__ == "__main__":
    main(*sys.argv[1:])
