"""Seven variants by a user, at most 15 lines each: right beside formulas in float64, on every backend."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import python
from interpreting import INTERPRETED
from polyattn import unregister_variant, variants
from variant_examples import DECODES, FORMULAS, check, examples


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    for name in [name for name in variants() if name.startswith("ex_")]:
        unregister_variant(name)


def test_there_are_seven_of_at_most_15_lines() -> None:
    names = [example.__name__ for example in examples.EXAMPLES]
    assert names == list(FORMULAS)
    for example in examples.EXAMPLES:
        assert len(inspect.getsource(example).splitlines()) <= 15


@pytest.mark.parametrize("lens", [examples.LENS, DECODES], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", FORMULAS)
def test_right_with_torch(name: str, lens: tuple[list[int], list[int]]) -> None:
    check("TORCH_SDPA", name, lens)


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples.main()
    assert len(capsys.readouterr().out.splitlines()) == 7


HARDEST = ("flash_sigmoid", "speculation_tree", "documents", "t5_bias")
"""They leave the softmax out or read inputs. `test_random_functions.py` draws the others' kind."""
COMPILED = ("flash_sigmoid", "documents", "t5_bias")
"""For FLEX_ATTENTION a tree is a mask with inputs, as documents are."""


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        *(pytest.param(backend, HARDEST, marks=pytest.mark.slow) for backend in INTERPRETED),
        pytest.param("FLEX_ATTENTION", COMPILED, marks=pytest.mark.slow),
        *(
            pytest.param(backend, (), marks=pytest.mark.sweep)
            for backend in (*INTERPRETED, "FLEX_ATTENTION")
        ),
    ],
)
def test_right_where_they_are_generated_or_compiled(
    backend: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip({"TRITON_ATTN": "triton", "PALLAS_ATTN": "jax"}.get(backend, "torch"))
    variables = INTERPRETED.get(backend, {}) | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("variant_examples.py")
    ran = python(script, backend, "cpu", "float32", *names, seconds=1200, **variables)
    lines = ran.stdout.splitlines()
    # torch's flex_attention always takes a softmax.
    refused = [line for line in lines if "refused" in line]
    assert len(lines) == 2 * len(names or FORMULAS) and "WRONG" not in ran.stdout, (
        ran.stdout + ran.stderr[-2000:]
    )
    assert len(refused) == (2 if backend == "FLEX_ATTENTION" else 0)
    assert all(
        "flash_sigmoid" in each and "can't leave the softmax out" in each for each in refused
    )
