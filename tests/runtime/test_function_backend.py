"""A backend in one function: what it is handed, what is refused, and that it is a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyattn
import pytest
import torch
from distributions import install
from polyattn import LayerSpec, resolve_device
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.errors import PluginError
from polyattn.kernel import backend
from polyattn.plugin import Priority
from torch import Tensor

CPU = resolve_device("cpu")


@backend(
    "SMALLEST", platforms="cpu", dtypes=("float32", "bfloat16"), head_sizes=(64, 128),
    features=("causal", "lse"), priorities=(Priority(score=10**6),),
)  # fmt: skip
def smallest(query, key, value, mask, scale, return_lse):  # type: ignore[no-untyped-def]
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.float())
    return (out, scores.logsumexp(-1).T) if return_lse else out


@backend(
    "DECODES", platforms="cpu", dtypes="float32", head_sizes=64, features="causal", block_sizes=16
)
def decodes(query, key, value, scale, block_table, seq_lens, out):  # type: ignore[no-untyped-def]
    for row, length in enumerate(seq_lens.tolist()):
        blocks = block_table[row, : -(-length // 16)].long()
        k, v = (x[blocks].flatten(0, 1)[:length] for x in (key, value))
        weights = (torch.einsum("hd,khd->hk", query[row], k) * scale).softmax(-1)
        out[row] = torch.einsum("hk,khd->hd", weights, v)


@backend("PACKED", platforms="cpu", dtypes="float32", head_sizes=64, features="non_causal")
def packed(query, key, value, scale, query_start_loc, key_start_loc, out):  # type: ignore[no-untyped-def]
    ends = zip(query_start_loc.tolist()[1:], key_start_loc.tolist()[1:], strict=True)
    first, start = 0, 0
    for last, end in ends:
        scores = torch.einsum("qhd,khd->hqk", query[first:last], key[start:end]) * scale
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[start:end])
        first, start = last, end


@pytest.fixture(
    params=[*(pytest.param(f, marks=pytest.mark.slow) for f in (smallest, decodes)), packed],
    ids=["SMALLEST", "DECODES", "PACKED"],
)
def registered(request: pytest.FixtureRequest) -> Iterator[Any]:
    polyattn.register(request.param)
    yield request.param
    polyattn.unregister(request.param.__name__)


def test_it_passes_the_kit_and_is_selected(registered: Any) -> None:
    cases = derive(registered.info, CPU)
    for case in cases:
        run_case(case, registered.name, CPU, 3, 0.0)
    assert len(cases) > 30
    if registered is smallest:
        spec = LayerSpec(num_heads=4, head_size=64, dtype="float32", cached=False)
        assert "SMALLEST" in str(polyattn.select(spec, "cpu").decision.chosen)


def test_keys_that_lie_apart_reach_a_packed_function() -> None:
    query, key = torch.randn(2, 5, 3, 64), torch.randn(2, 9, 3, 64)
    polyattn.register(packed)
    try:
        found = polyattn.attention(query, key, key, key_lens=(4, 9), backend="PACKED")
    finally:
        polyattn.unregister("packed")
    for row, length in enumerate((4, 9)):
        heads = (x.transpose(0, 1) for x in (query[row], key[row, :length], key[row, :length]))
        wanted = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(0, 1)
        torch.testing.assert_close(found[row], wanted)


SAID: dict[str, Any] = {
    "platforms": "cpu", "dtypes": "float32", "head_sizes": 64, "features": ("causal",)
}  # fmt: skip


def declare(function: Any, **claims: Any) -> Any:
    return backend("REFUSED", **{**SAID, **claims})(function)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None: ...
def misspelt(query: Tensor, key: Tensor, value: Tensor, scale: float, windw: int) -> None: ...
def no_scale(query: Tensor, key: Tensor, value: Tensor) -> None: ...
def pages(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor, seq_lens: Tensor
) -> None: ...


@pytest.mark.parametrize(
    ("function", "claims", "message"),
    [
        (misspelt, {}, "parameter 'windw' is unknown; did you mean 'window'"),
        (no_scale, {}, "has no parameter 'scale'; add it"),
        (whole, {"features": ("causal", "sliding_window")}, "no parameter 'window' or 'mask'"),
        (whole, {"features": ("causal", "non_causal")}, "has no parameter 'causal'"),
        (whole, {"features": ("causal", "variant")}, "can't claim 'variant'; write a class"),
        (whole, {"features": ("causl",)}, "did you mean 'causal'"),
        (whole, {"features": ("sinks",)}, "did you mean 'learned_sinks'"),
        (whole, {"graph_capture": 1}, "can't claim 'graph_capture'"),
        (whole, {"dtype": "float32"}, "can't claim 'dtype'; did you mean 'dtypes'"),
        (whole, {"kv_cache_dtypes": "int8"}, "no parameters 'k_scale' and 'v_scale'"),
        (whole, {"head_sizes": "64"}, "head_sizes='64': .* must be frozenset"),
        (pages, {}, r"block_sizes= is missing; .* as block_sizes=\(16, 32\) does"),
        (3, {}, "3 is no function"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(
    function: Any, claims: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        declare(function, **claims)


def test_a_function_inside_another_is_refused() -> None:
    def inner(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None: ...

    with pytest.raises(PluginError, match="move the function to its module's top level"):
        declare(inner)


def test_an_entry_point_may_name_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = "[polyattn.plugins]\nmine = mine_kernels:attend\n"
    install(tmp_path, "mine", "1.0", points=points)
    (tmp_path / "mine_kernels.py").write_text(
        "from polyattn.kernel import backend\n\n\n"
        "@backend('MINE', platforms='cpu', dtypes='float32', head_sizes=64, features='causal')\n"
        "def attend(query, key, value, scale):\n    return query * 0 + 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.randn(1, 2, 5, 64)
    found = polyattn.attention(x, x, x, causal=True, backend="MINE")
    assert bool((found == 7).all())


def test_nothing_is_claimed_that_was_not_said() -> None:
    caps = declare(whole).info.capabilities
    assert caps.features == {"causal"} and caps.dtypes == {"float32"} and caps.cached == {False}
    assert caps.head_sizes.values == {64} and caps.roles == {polyattn.Role.DECODER}
    caps = declare(pages, block_sizes=32).info.capabilities
    assert caps.phases == {"decode"} and caps.preferred_block_size == 32 and caps.cached == {True}


@backend("WRONG_SHAPE", **SAID)
def wrong_shape(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return query[:, 0]


def test_a_result_of_another_shape_is_named() -> None:
    polyattn.register(wrong_shape)
    try:
        x = torch.randn(1, 2, 5, 64)
        with pytest.raises(PluginError, match=r"an output of shape .*; it must be \(tokens, heads"):
            polyattn.attention(x, x, x, causal=True, backend="WRONG_SHAPE")
    finally:
        polyattn.unregister("wrong_shape")


@backend("BROKEN", platforms="cpu", dtypes="float32", head_sizes=64, features="causal")
def broken(query, key, value, mask, scale):  # type: ignore[no-untyped-def]
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_of_a_kernel_names_its_backend_and_layer() -> None:
    """Torch's words say neither, and an operator asks for both."""
    polyattn.register(broken)
    try:
        spec = LayerSpec(num_heads=2, head_size=64, dtype="float32", cached=False)
        layer = polyattn.Attention(polyattn.select(spec, "cpu", backend="BROKEN", verify=False))
        rows = torch.randn(3, 2, 64)
        dense = rows[None]
        for call in (
            lambda: layer(rows, rows, rows, None, polyattn.Batch.from_lens([3], [3])),
            lambda: polyattn.attention(dense, dense, dense, causal=True, backend="BROKEN"),
        ):
            with pytest.raises(RuntimeError, match="illegal memory access") as caught:
                call()
            (note,) = caught.value.__notes__
            assert "raised by BROKEN for prefill, of attention, 2 heads of 64" in note
            assert "in a step of query_lens=[3], lens=[3]." in note
            assert "POLYATTN_CHECKS=1" in note
    finally:
        polyattn.unregister(broken)
