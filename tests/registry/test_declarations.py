"""Whatever a plugin declares: it is taken, or named with its fault; nobody else notices."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyattn import LayerSpec, PolyattnError, register, select, unregister
from polyattn.plugin import (
    AttentionKind,
    BackendInfo,
    Capabilities,
    Device,
    GraphCapture,
    Platform,
    Priority,
    Proof,
    Role,
    Sizes,
    hookimpl,
    one_of,
)
from polyattn.registry.capabilities import check
from polyattn.registry.discovery import discover
from polyattn.registry.machine import availabilities
from polyattn.spec.features import FEATURES
from polyattn.spec.kinds import DTYPES, KV_CACHE_DTYPES
from polyattn.tools.cli.listing import backend_rows, plugin_rows
from polyattn.tools.cli.support import matrix

SPEC = LayerSpec(num_heads=4, head_size=64, dtype="float32")
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "A", "a,b", "[red]", "\x1b[31m", "cpu", "sm_80+", "a:b", "x" * 5000]),
)
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.binary(max_size=5),
        st.sampled_from([*AttentionKind, *Role, *GraphCapture, *Proof, object(), int]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXTS, inner, max_size=2),
    ),
    max_leaves=4,
)  # fmt: skip
LIKELY = st.sampled_from([*DTYPES, *KV_CACHE_DTYPES, *FEATURES, "NHD", "HND", "prefill", "decode"])
SETS = st.frozensets(LIKELY, max_size=4)
SIZES = st.builds(Sizes, values=st.frozensets(st.integers(1, 300), max_size=3))


def fields_of(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Any value for any of a dataclass's fields, more often one that looks right."""
    one = st.one_of(JUNK, TEXTS, SETS, SIZES, st.lists(TEXTS, max_size=2).map(tuple))
    names = [field.name for field in dataclasses.fields(kind)]
    return st.dictionaries(st.sampled_from(names), one, max_size=3)


@st.composite
def declarations(draw: st.DrawFn) -> Any:
    """A function that makes what a hook returns; it may raise, as a plugin's module may."""
    claims = {"platforms": {"cpu": ()}, "dtypes": frozenset({"float32"})}
    claims |= draw(fields_of(Capabilities))
    info = draw(fields_of(BackendInfo))
    priority, platform = draw(fields_of(Priority)), draw(fields_of(Platform))
    which = draw(st.sampled_from(["claims", "info", "priority", "platform"]))

    def make() -> tuple[list[Any], list[Any]]:
        base: dict[str, Any] = {
            "name": "DRAWN",
            "summary": "",
            "path": "polyattn_cpu.sdpa:TorchSDPA",
        }
        base["capabilities"] = Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"}))
        if which == "claims":
            base["capabilities"] = Capabilities(**claims)
        if which == "priority":
            base["priorities"] = (Priority(**({"score": 1} | priority)),)
        if which == "info":
            base |= info
        if which == "platform":
            return [], [Platform(**({"name": "drawn", "detect": "a:b"} | platform))]
        return [BackendInfo(**base)], []

    return make


class Plugin:
    """Declares what `make` returns each time it is asked: backends, and platforms."""

    def __init__(self, make: Callable[[], tuple[Sequence[Any], Sequence[Any]]]):
        self.make = make

    @hookimpl
    def polyattn_api_versions(self) -> tuple[int, int]:
        return (1, 1)

    @hookimpl
    def polyattn_backends(self) -> list[Any]:
        return list(self.make()[0])

    @hookimpl
    def polyattn_platforms(self) -> list[Any]:
        return list(self.make()[1])


@settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(declarations())
def test_any_declaration_is_taken_or_named(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    monkeypatch.setenv("POLYATTN_PLUGINS", "cpu,drawn")  # the others' hooks aren't asked each time
    register(Plugin(make), "drawn")
    try:
        registry = discover()
        record = next(p for p in registry.plugins if p.name == "drawn")
        if record.status == "broken":
            assert record.problem and record.problem.isprintable() and len(record.problem) <= 300
        rows = [*plugin_rows(registry), *backend_rows(registry)]
        assert all(str(value).isprintable() for row in rows for value in row.values())
        matrix(list(registry.backends.values()))
        availabilities(registry.backends.values(), 2.0)
        for info in record.backends:
            hash(info.capabilities)
            try:
                assert select(SPEC, "cpu", backend=info.name).explain()
            except PolyattnError as error:  # it may claim less than this layer needs
                assert info.name in str(error)
        named = {b.name for b in record.backends}
        chosen = select(SPEC, "x86-amx").decision
        assert chosen.prefill == "NATIVE_ATTN" or chosen.prefill in named
    finally:
        unregister("drawn")


@pytest.fixture
def claims() -> Iterator[dict[str, Any]]:
    yield {
        "platforms": {"cpu": (), "cuda": ("sm_80+",)},
        "features": frozenset({"causal", "alibi"}),
        "excludes": ((frozenset({"alibi", "decode"}), "why"),),
        "remedies": {"lse": "another build"},
        "head_sizes": one_of(64, 128),
    }


def test_equal_capabilities_hash_equally(claims: dict[str, Any]) -> None:
    first = Capabilities(**claims)
    for second in (Capabilities(**claims), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert first == second and hash(first) == hash(second)
    assert {first: 1}[Capabilities(**claims)] == 1


def test_claims_do_not_change_with_what_they_were_made_of(claims: dict[str, Any]) -> None:
    caps = Capabilities(**claims)
    before = hash(caps)
    claims["platforms"]["tpu"] = ()
    claims["remedies"]["lse"] = ""
    assert hash(caps) == before and "tpu" not in caps.platforms and caps.remedies["lse"]


def test_excludes_may_name_what_can_be_excluded() -> None:
    words = ("sm_75", "bfloat16"), ("encoder", "alibi"), ("fp8_e4m3", "prefill"), ("x86_64", "lse")
    Capabilities(
        platforms={"cuda": ("sm_75-sm_90",), "cpu": ()},
        excludes=tuple((frozenset(pair), "why") for pair in words),
    )


def test_a_store_is_asked_for_what_it_excludes() -> None:
    store = Capabilities(
        platforms={"cpu": ()},
        phases=frozenset({"store"}),
        dtypes=frozenset({"bfloat16", "float32"}),
        kv_cache_dtypes=frozenset({"auto", "int8"}),
        excludes=((frozenset({"float32", "int8"}), "too wide"),),
        remedies={"float16": "halves are not for this one"},
    )
    device = Device("cpu", "x86_64", "any")
    good = LayerSpec(num_heads=2, head_size=64, kv_cache_dtype="int8")
    assert not check(store, good, device, "store")
    (found,) = check(store, good.replace(dtype="float32"), device, "store")
    assert found.field == "float32 with int8" and found.remedy == "too wide"
    (found,) = check(store, good.replace(dtype="float16"), device, "store")
    assert found.field == "dtype" and found.remedy == "halves are not for this one"


@pytest.mark.parametrize(
    ("claims", "message"),
    [
        ({"platforms": {"gpu": ()}}, "platforms: 'gpu' is no platform; write 'cuda', 'rocm'"),
        ({"platforms": {"cuda": ("sm90+",)}}, r"no device has the arch 'sm90\+'; write 'sm_90\+'"),
        (
            {"platforms": {"cuda": ()}, "fp8_formats": frozenset({"e4m3"})},
            r"fp8_formats: unknown \['e4m3'\]",
        ),
    ],
)
def test_what_no_device_can_have_is_refused(claims: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Capabilities(**claims)


def test_a_platform_that_nobody_brings_is_a_problem() -> None:
    info = BackendInfo(
        name="LOST", summary="", path="a:b", capabilities=Capabilities(platforms={"cudaa": ()})
    )

    register(Plugin(lambda: ([info], [])), "lost")
    try:
        (problem,) = discover().problems
        assert "LOST of plugin 'lost'" in problem
        assert "Capabilities.platforms: 'cudaa' is unknown; did you mean 'cuda'?" in problem
    finally:
        unregister("lost")


def test_a_name_that_cannot_be_named_is_refused() -> None:
    with pytest.raises(PolyattnError, match="can't be used"):
        register(object(), "a, b")
