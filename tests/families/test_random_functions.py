"""Random functions, drawn by hypothesis: every CPU backend that takes variants is the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from forks import python
from hypothesis import given, settings
from random_functions import Expression, check, floats, truths, variant_of


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.sweep)])
def test_torch_s(count: int) -> None:
    check("TORCH_SDPA", count)


def test_jax_numpy_s_on_numbers() -> None:
    """The generated source alone, for all places at once; the kernel around it has tests of its own."""
    pytest.importorskip("jax")
    import jax.numpy as jnp
    from polyattn.runtime.functions.pointwise import Pointwise
    from polyattn_tpu.pointwise import Functions

    generator = torch.Generator().manual_seed(2)
    places = torch.broadcast_tensors(
        torch.randn(3, 4, 6, 21, generator=generator), torch.arange(3)[:, None, None, None],
        torch.arange(4)[:, None, None], torch.arange(15, 21)[:, None], torch.arange(21),
    )  # fmt: skip
    inputs = {
        "temperature": torch.rand(4, generator=generator),
        "table": torch.randn(6, generator=generator),
        "document": torch.randint(0, 3, (3, 40), generator=generator).int(),
    }
    arrays = [jnp.asarray(t.numpy().astype("float32" if t.is_floating_point() else "int32"))
              for t in places]  # fmt: skip

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(floats(3), truths(2))
    def right(score: Expression, seen: Expression) -> None:
        pointwise = Pointwise.of_variant(variant_of(score, seen))
        functions = Functions.of_pointwise(pointwise)
        read = functions.given({n: jnp.asarray(t.numpy()) for n, t in inputs.items()})
        found = [torch.from_numpy(np.array(a)) for a in functions.call(*arrays, read)]
        wide = (places[0].double(), *places[1:])
        assert torch.allclose(
            found[0].double(), pointwise.score(wide[0], wide[1:], inputs), atol=2e-5
        )
        assert torch.equal(found[1], pointwise.visible(places[1:], inputs))

    right()


def run_apart(backend: str, count: int, **variables: str) -> None:
    script = Path(__file__).with_name("random_functions.py")
    ran = python(script, backend, str(count), seconds=1200, **variables)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.slow
def test_generated_ones_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    run_apart("TRITON_ATTN", 8, TRITON_INTERPRET="1")


@pytest.mark.sweep
def test_more_of_them() -> None:
    pytest.importorskip("triton")
    run_apart("TRITON_ATTN", 60, TRITON_INTERPRET="1")


@pytest.mark.sweep  # eight seconds of torch's compiler each; the examples' and other variants' are slow
def test_torch_s_compiled() -> None:
    run_apart("FLEX_ATTENTION", 8)


@pytest.mark.sweep  # the generated source has a test above, the kernel around it the examples
def test_pallas_s_interpreted() -> None:
    pytest.importorskip("jax")
    run_apart(
        "PALLAS_ATTN", 8, PALLAS_INTERPRET="1", JAX_PLATFORMS="cpu",
        PALLAS_BUCKETS="tokens=16,seqs=8,pages=64",
    )  # fmt: skip
