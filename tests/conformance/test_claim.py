"""`polyattn claim` writes exactly what a function can do: functions whose abilities are known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from polyattn import discover, register, resolve_device, unregister
from polyattn.conformance import claim
from polyattn.conformance.cases.attention import BLOCK_SIZES, GQA_RATIOS, HEAD_SIZES, ONE_LAYER
from polyattn.conformance.claim import Findings, find
from polyattn.conformance.derive import derive
from polyattn.kernel import backend
from polyattn.tools.cli.entry import run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SIZES, RATIOS, BLOCKS = set(HEAD_SIZES), set(GQA_RATIOS), set(BLOCK_SIZES)
FLOATS = {"bfloat16", "float16", "float32", "float64"}
ROLES = {"decoder", "encoder", "encoder_only", "cross"}
MASKED = {"causal", "non_causal", "sliding_window", "window_right", "chunked", "sink_tokens"}
LAYOUTS = {"NHD", "HND", "contiguous"}


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def no_gqa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    heads = (x.transpose(0, 1) for x in (query, key, value))
    return scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale).transpose(0, 1)


def only_64(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    assert query.shape[2] == value.shape[2] == 64
    return sdpa(query, key, value, mask, scale)


def only_bf16(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    assert query.dtype == torch.bfloat16
    return sdpa(query, key, value, mask, scale)


def wrong_scale(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    assert query.dtype == torch.float32
    return sdpa(query, key, value, mask, query.shape[2] ** -0.5)


def plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return output and LSE by flash-attn's window, aligned to the bottom right."""
    ratio, dtype = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (x.to(dtype).repeat_interleave(ratio, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), key) * scale
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    ahead = torch.arange(len(key)) - at
    left, right = window
    hidden = ((ahead < -left) & (left >= 0)) | ((ahead > right) & (right >= 0))
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1).T


def windowed(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int]
) -> Tensor:
    return plain(query, key, value, scale, window)[0]


def bare(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: tuple[int, int]
) -> Tensor:
    """What `no_gqa`, `only_bf16` and `windowed` can't do, in one."""
    assert query.dtype == torch.bfloat16 and query.shape[1] == key.shape[1]
    return windowed(query, key, value, scale, window)


def with_lse(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, return_lse: bool
) -> Any:
    found = plain(query, key, value, scale, (-1, 0 if causal else -1))
    return found if return_lse else found[0]


def paged(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor,
) -> Tensor:  # fmt: skip
    """Causal attention over pages (blocks, block size, KV heads, size), whatever the strides."""
    out = torch.zeros(*query.shape[:2], value.shape[3], dtype=query.dtype)
    starts = query_start_loc.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        blocks = block_table[index, : -(-length // key.shape[1])].long()
        k, v = (x[blocks].flatten(0, 1)[:length] for x in (key, value))
        out[rows] = plain(query[rows], k, v, scale, (-1, 0))[0].to(out.dtype)
    return out


def paged_nhd(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor,
) -> Tensor:  # fmt: skip
    """Pages whose blocks lie (block size, KV heads, size)."""
    assert all(x.shape[2] == 1 or x.stride(1) > x.stride(2) for x in (key, value))
    return paged(query, key, value, scale, block_table, seq_lens, query_start_loc)


def paged_hnd(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor,
) -> Tensor:  # fmt: skip
    """Pages whose blocks lie (KV heads, block size, size)."""
    size, heads = key.shape[1:3]
    assert heads == 1 or size == 1 or key.stride(2) == size * key.stride(1)
    return paged(query, key, value, scale, block_table, seq_lens, query_start_loc)


def blocks_of_16(
    query: Tensor, key: Tensor, value: Tensor, scale: float, block_table: Tensor,
    seq_lens: Tensor, query_start_loc: Tensor,
) -> Tensor:  # fmt: skip
    assert key.shape[1] == 16
    return paged(query, key, value, scale, block_table, seq_lens, query_start_loc)


WHOLE = {
    "platforms": {"cpu"}, "dtypes": FLOATS, "head_sizes": SIZES, "gqa_ratios": RATIOS,
    "features": MASKED | {"gqa", "v_head_size"}, "roles": ROLES,
}  # fmt: skip
PAGES = {
    "platforms": {"cpu"}, "dtypes": FLOATS, "head_sizes": SIZES, "gqa_ratios": RATIOS,
    "features": {"causal", "gqa", "v_head_size"}, "roles": {"decoder"}, "layouts": LAYOUTS,
    "block_sizes": BLOCKS, "phases": {"prefill", "decode"}, "kv_cache_dtypes": {"auto"},
}  # fmt: skip
WINDOWS = MASKED - {"chunked", "sink_tokens"}
KNOWN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (sdpa, WHOLE),
    (no_gqa, WHOLE | {"features": MASKED | {"v_head_size"}, "gqa_ratios": None}),
    (only_64, WHOLE | {"head_sizes": {64}, "features": MASKED | {"gqa"}}),
    (only_bf16, WHOLE | {"dtypes": {"bfloat16"}}),
    (windowed, WHOLE | {"features": WINDOWS | {"gqa", "v_head_size"}}),
    (
        bare,
        WHOLE | {"dtypes": {"bfloat16"}, "features": WINDOWS | {"v_head_size"}, "gqa_ratios": None},
    ),
    (with_lse, WHOLE | {"features": {"causal", "non_causal", "gqa", "v_head_size", "lse"}}),
    (paged_nhd, PAGES | {"layouts": {"NHD"}}),
    # A contiguous cache lies (KV heads, tokens, size) as well: `KVCache.contiguous`.
    (paged_hnd, PAGES | {"layouts": {"HND", "contiguous"}}),
    (blocks_of_16, PAGES | {"block_sizes": {16}}),
    (wrong_scale, {}),
]


OTHERS = ",".join(p.name for p in discover().plugins if p.name not in ("core", "cpu"))
"""Plugins that no claim here needs: each trial discovers anew, timing tables and all."""
ONE_BY_ONE = (no_gqa, only_bf16, windowed)
"""What `bare` joins: the sweep's."""
PROVED_ALONE = (*ONE_BY_ONE, bare, only_64, with_lse, paged_hnd, blocks_of_16)
"""Of these the claims are proved; what every backend must do, too, the others show."""


@pytest.fixture(autouse=True)
def without_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", OTHERS)


def found_of(function: Callable[..., Any]) -> Findings:
    return find(function, function.__name__.upper(), resolve_device("cpu"), seed=1, budget=0.5)


@pytest.mark.parametrize(
    ("function", "known"),
    [
        pytest.param(
            *pair,
            id=pair[0].__name__,
            marks=pytest.mark.sweep if pair[0] in ONE_BY_ONE else pytest.mark.slow,
        )
        for pair in KNOWN
    ],
)
def test_claim_writes_exactly_what_a_function_can_do(
    function: Callable[..., Any], known: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if function in PROVED_ALONE:
        proving = lambda info, device, whole: derive(info, device, False)  # noqa: E731
        monkeypatch.setattr(claim, "derive", proving)
    findings = found_of(function)
    assert not findings.failures
    if (
        function is wrong_scale
    ):  # what keeps it from claims: not that it refuses bfloat16, tried first
        assert "# not claim 'any': numeric-decoder_uncached_scale" in findings.manifest()
    claims = {name: set(values) for name, values in findings.claims.items()}
    assert claims == {name: values for name, values in known.items() if values is not None}
    for name, values in findings.claims.items():
        assert all(findings.proof[name, value] for value in values)
    assert bool(findings.claims) == findings.manifest().startswith("@backend(")
    if claims:  # the manifest is code that declares the same
        text = findings.manifest().partition("\n)")[0].removeprefix("@")
        again = eval(f"{text}\n)", {"backend": backend})(function)
        assert again.info.capabilities.head_sizes.values == claims["head_sizes"]
        assert again.info.capabilities.features == claims["features"]


@pytest.mark.slow
def test_a_failure_that_belongs_to_no_claim_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every backend must do is looked at last: this one takes no slices."""
    looked_at = {*ONE_LAYER, "out", "strided"}
    few = lambda *given: [case for case in derive(*given) if case.check in looked_at]  # noqa: E731
    monkeypatch.setattr(claim, "derive", few)

    def forgets_nothing(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        assert (
            len(query) == query.shape[0] and query.shape[2] == 64 and query.dtype == torch.float32
        )
        assert query.is_contiguous(), "slices of one projection aren't taken"
        return sdpa(query, key, value, mask, scale)

    findings = found_of(forgets_nothing)
    assert set(findings.claims["head_sizes"]) == {64}
    assert any(line.startswith("strided-") for line in findings.failures)
    assert "# fails: strided-" in findings.manifest()


def test_the_command_prints_the_decorator(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A backend of the function's name doesn't matter, as that of an author who has installed it."""
    (tmp_path / "claimed_kernel.py").write_text(
        "def nothing(query, key, value, scale):\n    raise RuntimeError('no kernel')\n"
    )
    installed = backend(
        "NOTHING", platforms="cpu", dtypes="float32", head_sizes=64, features="causal"
    )
    register(installed(with_lse), "an-installed-plugin")
    request.addfinalizer(lambda: unregister("an-installed-plugin"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(claim, "DEPARTURES", 0)  # the usual layer alone is tried
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["claim", "claimed_kernel:nothing", "--device", "cpu"]) == 1
    out, errors = capsys.readouterr()
    assert "RuntimeError: no kernel" in out and "\033[Knumeric-decoder_uncached-given" in errors
    assert run(["claim", "claimed_kernel:nothin", "--device", "cpu"]) == 2
    assert "write module:function" in capsys.readouterr().err


CRASHING = """
import os, signal
from torch.nn.functional import scaled_dot_product_attention


def only_64(query, key, value, mask, scale):
    if query.shape[2] != 64 or value.shape[2] != 64:
        os.kill(os.getpid(), signal.SIGKILL)
    heads = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the trials run in forks")
def test_a_function_that_crashes_fails_a_case_and_the_rest_is_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_kernel.py").write_text(CRASHING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(claim, "_DTYPES", ("float32",))
    monkeypatch.setattr(claim, "_HEAD_SIZES", (128, 64, 32))
    monkeypatch.setattr(claim, "GQA_RATIOS", (1, 2, 3))
    monkeypatch.setattr(claim, "READ_BY", {"v_head_size": (), "non_causal": ("mask",)})
    run(["claim", "crashing_kernel:only_64", "--device", "cpu", "--seconds", "0.1"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for size in (128, 32):
        line = next(line for line in lines if line.startswith(f"# not head_sizes {size}: "))
        assert line.endswith("the function ended its process (SIGKILL)")
    assert any(line.startswith("# not features 'v_head_size': ") for line in lines)
    for proof in (
        "64,  # numeric-decoder_uncached-given",
        "3,  # numeric-decoder_uncached_gqa_3-more_keys",
        "'non_causal',  # numeric-decoder_uncached_feature_non_causal-more_keys",
    ):
        assert proof in lines, "a claim after a crash has its own case"
