"""Do stores rotate as the float64 formulas say? Any pairing, part of a head, dtype and cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from polyattn.runtime.backend import StoreBackend
from polyattn.runtime.store import TorchStore
from rotated import CPU, OWN_ERRORS, check, specs

STORED = ("auto", "int8", "fp8_e4m3", "fp8_e5m2")
CASES = [*specs(("bfloat16",), STORED), *specs(("float32", "float16"), ("auto",))]
PRECISE = list(specs(("float64",), ("auto",)))


@pytest.mark.parametrize("case", CASES + PRECISE, ids=[case[0] for case in CASES + PRECISE])
def test_torch_store(case: tuple[str, Any, str, bool]) -> None:
    _, spec, layout, biased = case
    store = TorchStore(spec, None, CPU)
    check(store.run_rotated, spec, layout, biased, keep=True)
    by_default = functools.partial(StoreBackend.run_rotated, store)
    twice = spec.kv_cache_dtype != "auto"  # rounded to bfloat16, then to 8 bits
    check(by_default, spec, layout, biased, True, 2.0**-7 if twice else OWN_ERRORS)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_native_store(case: tuple[str, Any, str, bool]) -> None:
    library = pytest.importorskip("polyattn_cpu.native.library")
    if library.why_not():
        pytest.skip(library.why_not())
    from polyattn_cpu.native.store import NativeStore

    _, spec, layout, biased = case
    for keep in (False, True):
        check(NativeStore(spec, None, CPU).run_rotated, spec, layout, biased, keep)
