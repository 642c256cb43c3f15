"""Sources by hand beside functions: used instead of what is generated, held to what the functions say."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import python
from interpreting import INTERPRETED
from polyattn import AttentionVariant
from polyattn.errors import SpecError
from polyattn.runtime.functions.pointwise import Pointwise
from polyattn.runtime.functions.tracing import UntraceableError, trace, untraceable
from written_by_hand import HONEST, SOURCES, bent, near

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("backend", INTERPRETED)
def test_right_and_caught_when_it_lies(backend: str, tmp_path: Path) -> None:
    """By the kit, whose cases follow from there being a source, and where a backend is verified."""
    pytest.importorskip("triton" if backend == "TRITON_ATTN" else "jax")
    variables = INTERPRETED[backend] | {
        "PYTHONPATH": f"{HERE}:{HERE.parent}", "TRITON_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    ran = python(HERE / "interpreted_written.py", backend, seconds=600, **variables)
    assert ran.stdout == "right\n", ran.stderr[-3000:]


def test_a_source_needs_no_tracing() -> None:
    assert "'erf'" in str(untraceable(HONEST, "Triton's kernels"))
    for language in SOURCES:
        assert untraceable(HONEST, "kernels", language) is None
        pointwise = Pointwise.of_variant(HONEST, language)
        traced = trace(pointwise.score_mod, pointwise.mask_mods, pointwise.inputs)
        assert traced.written == SOURCES[language]
        assert set(traced.inputs) == {"gain", "shift", "reach"}
    with pytest.raises(UntraceableError, match="'erf'"):
        plain = Pointwise.of_variant(HONEST)
        trace(plain.score_mod, plain.mask_mods, plain.inputs)


def test_a_source_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bent.py"
    found = AttentionVariant(
        name="x", score_mod=bent, inputs=HONEST.inputs, sources={"triton": path}
    )
    with pytest.raises(SpecError, match=r"sources\['triton'\]=.*bent.py.* can't be read"):
        found.source("triton")
    path.write_text(SOURCES["triton"])
    assert found.source("triton") == SOURCES["triton"] and found.source("cuda") is None


def test_what_is_wrong_is_named() -> None:
    def made(**sources: str) -> AttentionVariant:
        return AttentionVariant(
            name="x", score_mod=bent, mask_mod=near, inputs=HONEST.inputs, sources=sources
        )

    with pytest.raises(SpecError, match=r"sources has 'tritn'.*it may have triton, cuda, jax"):
        made(tritn="x")
    with pytest.raises(SpecError, match=r"sources\['cuda'\]=' ' must be a text"):
        made(cuda=" ")
    with pytest.raises(SpecError, match="must map languages"):
        AttentionVariant(name="x", score_mod=bent, inputs=HONEST.inputs, sources="x")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="neither score_mod nor mask_mod"):
        AttentionVariant(name="x", query_mod=lambda *a: a[0], sources={"jax": "x = 1"})
    for language, text in SOURCES.items():
        problem = untraceable(made(**{language: text.replace("mask_mod", "mask")}), "x", language)
        assert problem == f"sources[{language!r}] defines no mask_mod"
    problem = untraceable(made(jax="def score_mod(:"), "x", "jax")
    assert problem is not None and problem.startswith("sources['jax'], line 1: invalid syntax")
