"""The decision tree, as tables that read like it."""

from __future__ import annotations

from itertools import product

import pytest
from fakes import (
    A100,
    BIG_BLOCKS,
    FAST_DECODE,
    FAST_PREFILL,
    GENERAL,
    H100,
    HND_ONLY,
    HOPPER,
    LATENT,
    LLAMA,
    MAMBA,
    backend,
    choose,
)
from polyattn.device import Device
from polyattn.errors import SelectionError, SettingsError
from polyattn.registry.capabilities import Capabilities, check
from polyattn.registry.devices import resolve_device
from polyattn.registry.info import BackendInfo
from polyattn.selection.tree import _by_rank
from polyattn.settings import Settings, parse_overrides
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

PHASES = ("prefill", "decode", "store", "merge")
ALL = (FAST_PREFILL, FAST_DECODE, GENERAL, HOPPER)


@pytest.mark.parametrize(
    ("named", "spec", "device", "prefill", "decode"),
    [
        # who was named              layer                    device  prefill         decode
        (None, LLAMA, H100, "HOPPER", "HOPPER"),
        (None, LLAMA, A100, "FAST_PREFILL", "FAST_DECODE"),
        (None, LLAMA.replace(head_size=96), H100, "FAST_PREFILL", "FAST_DECODE"),
        (None, LLAMA.replace(alibi=True), H100, "GENERAL", "GENERAL"),
        ("GENERAL", LLAMA, H100, "GENERAL", "GENERAL"),
        ("general", LLAMA, H100, "GENERAL", "GENERAL"),
        ("prefill=GENERAL", LLAMA, H100, "GENERAL", "HOPPER"),
        ("decode=FAST_DECODE", LLAMA, H100, "HOPPER", "FAST_DECODE"),
        ("prefill=HOPPER,decode=GENERAL", LLAMA, H100, "HOPPER", "GENERAL"),
        ("GENERAL,decode=HOPPER", LLAMA, H100, "GENERAL", "HOPPER"),
        ("attention.decode=GENERAL,decode=HOPPER", LLAMA, H100, "HOPPER", "GENERAL"),
    ],
)
def test_choice(
    named: str | None, spec: LayerSpec, device: Device, prefill: str, decode: str
) -> None:
    decision = choose(*ALL, spec=spec, device=device, named=named)
    assert (decision.prefill, decision.decode) == (prefill, decode)


@pytest.mark.parametrize(
    ("who", "spec", "says"),
    [
        ("HOPPER", LLAMA.replace(head_size=96), ["head_size: wanted 96, supported: 128, 64"]),
        (
            "HOPPER",
            LLAMA.replace(head_size=96, alibi=True),
            ["head_size: wanted 96", "alibi: wanted ALiBi", "GENERAL can"],
        ),
        ("FAST_PREFILL", LLAMA, ["phase: wanted decode", "name another backend for decode"]),
    ],
)
def test_a_named_backend_never_falls_back(who: str, spec: LayerSpec, says: list[str]) -> None:
    with pytest.raises(SelectionError) as caught:
        choose(*ALL, spec=spec, named=who)
    text = str(caught.value)
    assert all(words in text.replace("64, 128", "128, 64") for words in says), text


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'GENERAL'"):
        choose(*ALL, named="GENERALL")


def test_the_beginning_of_several_names_gives_each() -> None:
    with pytest.raises(SettingsError, match="did you mean 'FAST_DECODE' or 'FAST_PREFILL'"):
        choose(*ALL, named="fast")


def test_an_override_behaves_the_same_on_every_platform() -> None:
    profiles = map(resolve_device, ("a100", "mi300x", "x86-amx"))
    for device in (*profiles, Device("tpu", "v5e")):  # its plugin brings JAX, which may be missing
        with pytest.raises(SelectionError, match="never falls back"):
            choose(*ALL, spec=LLAMA, device=device, named="HOPPER")


def test_nobody_can_names_every_rejection_of_every_candidate() -> None:
    with pytest.raises(SelectionError) as caught:
        choose(*ALL, spec=LLAMA.replace(learned_sinks=True, head_size=96))
    text = str(caught.value)
    phases = ("HOPPER for prefill and decode", "FAST_PREFILL for decode", "FAST_DECODE for decode")
    for words in (*phases, "learned_sinks", "head_size"):
        assert words in text


def test_no_backend_of_the_kind_says_what_to_install() -> None:
    with pytest.raises(SelectionError, match=r"pip install .*(polyattn\[rocm\]|plugins/rocm)"):
        choose(*ALL, device=resolve_device("mi300x"))
    from polyattn.spec.recurrent import RecurrentSpec

    mamba = LayerSpec(
        kind="mamba2", num_heads=8, head_size=64, recurrent=RecurrentSpec(state_size=16)
    )
    with pytest.raises(SelectionError) as caught:
        choose(*ALL, spec=mamba)
    assert "none is for mamba2" in str(caught.value) and "pip install" not in str(caught.value)


def test_steps_are_recorded_in_order() -> None:
    decision = choose(*ALL)
    questions = [step.question for step in decision.steps]
    assert questions[0] == "Did the user name a backend?" and questions[-1] == "Which backends can?"
    assert len(questions) == 5
    judged = {
        phase: {v.backend for v in decision.verdicts() if v.phase == phase} for phase in PHASES
    }
    assert judged["prefill"] == judged["decode"] == {b.name for b in ALL}
    assert (judged["store"], judged["merge"]) == ({"TORCH_STORE"}, {"TORCH_MERGE"})
    assert "=> prefill HOPPER" in decision.explain()


# -- joint: two phases, one cache ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "block_size", "layout", "expect"),
    [
        ((GENERAL, HND_ONLY), None, None, ("HND", 16, (16, 16))),
        ((BIG_BLOCKS, BIG_BLOCKS), None, None, ("NHD", 64, (64, 64))),
        ((BIG_BLOCKS, BIG_BLOCKS), 128, None, ("NHD", 128, (64, 64))),
        ((GENERAL, BIG_BLOCKS), 192, None, ("NHD", 192, (192, 64))),
        ((GENERAL, GENERAL), None, "HND", ("HND", 16, (16, 16))),
    ],
)
def test_shared_cache(
    pair: tuple[BackendInfo, BackendInfo],
    block_size: int | None,
    layout: str | None,
    expect: tuple[str, int, tuple[int, int]],
) -> None:
    named = f"prefill={pair[0].name},decode={pair[1].name}"
    decision = choose(
        *set(pair), spec=LLAMA.replace(block_size=block_size), named=named,
        settings=Settings(layout=layout),
    )  # fmt: skip
    assert decision.cache is not None
    walked = dict(decision.kernel_block_sizes)
    sizes = (walked[pair[0].name], walked[pair[1].name])
    assert (decision.cache.layout, decision.cache.block_size, sizes) == expect


def test_rows_of_bytes_lie_as_the_decode_prefers() -> None:
    by_head = backend(
        "BY_HEAD", layouts=("NHD", "HND"), rows_layout="HND",
        kv_cache_dtypes=frozenset({"auto", "int4"}),
    )  # fmt: skip
    prefill = backend(
        "P", 90, phases=frozenset({"prefill"}), kv_cache_dtypes=frozenset({"auto", "int4"}),
    )  # fmt: skip
    rows = LLAMA.replace(kv_cache_dtype="int4")
    for spec, among, layout in (
        (rows, (by_head,), "HND"),
        (LLAMA, (by_head,), "NHD"),
        (rows, (by_head, prefill), "NHD"),  # which the prefill has not
    ):
        cache = choose(*among, spec=spec).cache
        assert cache is not None and cache.layout == layout
    asked = choose(by_head, spec=rows, settings=Settings(layout="NHD")).cache
    assert asked is not None and asked.layout == "NHD"
    with pytest.raises(ValueError, match=r"rows_layout='HND' is not among layouts \(NHD\)"):
        Capabilities(platforms={"cpu": ()}, rows_layout="HND")


def test_a_pair_without_a_common_layout_is_refused_with_the_reason() -> None:
    with pytest.raises(SelectionError) as caught:
        choose(HOPPER, HND_ONLY, named="prefill=HOPPER,decode=HND_ONLY")
    assert "HOPPER: NHD; HND_ONLY: HND" in str(caught.value)


def test_automatic_choice_passes_over_a_pair_that_does_not_fit() -> None:
    prefill = backend("P", 90, phases=frozenset({"prefill"}), layouts=("HND",))
    decode = backend("D", 90, phases=frozenset({"decode"}))
    decision = choose(prefill, decode, GENERAL)
    assert (decision.prefill, decision.decode) == ("GENERAL", "D")


def test_the_block_size_asked_for_is_kept() -> None:
    with pytest.raises(SelectionError, match="block_size: wanted 48"):
        choose(BIG_BLOCKS, spec=LLAMA.replace(block_size=48))


# -- families, facts ----------------------------------------------------------------------------


def test_each_kind_is_asked_of_its_own_backends() -> None:
    from polyattn.spec.latent import LatentSpec
    from polyattn.spec.recurrent import RecurrentSpec

    latent = LayerSpec(
        kind="mla", num_heads=8, head_size=192, v_head_size=128,
        latent=LatentSpec(rank=512, rope_head_size=64),
    )  # fmt: skip
    mamba = LayerSpec(
        kind="mamba2", num_heads=8, head_size=64, recurrent=RecurrentSpec(state_size=16)
    )
    claims = LATENT.capabilities.features | {"v_head_size"}
    able = backend(
        "LATENT", kinds=LATENT.capabilities.kinds, features=claims, phases=frozenset({"decode"})
    )
    # Its prefill is expanded: attention with two head sizes, over new tokens and over the context.
    wide = backend(
        "WIDE", 10, features=frozenset({"causal", "non_causal", "v_head_size", "lse"}),
        roles=frozenset({Role.DECODER, Role.CROSS}), cached=frozenset({True, False}),
    )  # fmt: skip
    decision = choose(*ALL, able, wide, MAMBA, spec=latent)
    assert (decision.prefill, decision.decode) == ("WIDE", "LATENT")
    assert choose(*ALL, able, MAMBA, spec=mamba).decode == "MAMBA"


def test_a_bare_name_from_the_environment_leaves_other_families_alone_and_says_so() -> None:
    from polyattn.spec.recurrent import RecurrentSpec

    mamba = LayerSpec(
        kind="mamba2", num_heads=8, head_size=64, recurrent=RecurrentSpec(state_size=16)
    )
    settings = Settings(sources=(parse_overrides("GENERAL", "POLYATTN_BACKEND"),))
    decision = choose(GENERAL, MAMBA, spec=mamba, settings=settings)
    assert decision.decode == "MAMBA"
    assert decision.notes == ("POLYATTN_BACKEND=GENERAL does not apply to mamba2 layers",)


def test_an_unavailable_or_wrong_backend_is_passed_over_only_on_a_real_device() -> None:
    real = H100.on("cuda:0")
    missing = {"HOPPER": "flash-attn-4 is not installed"}
    assert choose(*ALL, device=real, unavailable=missing).prefill == "FAST_PREFILL"
    assert choose(*ALL, device=H100, unavailable=missing).prefill == "HOPPER"
    assert choose(*ALL, device=real, failed={"HOPPER": "wrong"}).prefill == "FAST_PREFILL"
    with pytest.raises(SelectionError, match="verified.*output is wrong"):
        choose(*ALL, device=real, failed={"HOPPER": "its output is wrong"}, named="HOPPER")


def test_fp8_flavours_are_not_mixed_up() -> None:
    ocp = backend("OCP", platforms={"rocm": ()}, kv_cache_dtypes=frozenset({"auto", "fp8_e4m3"}))
    spec = LLAMA.replace(kv_cache_dtype="fp8_e4m3")
    assert check(ocp.capabilities, spec, resolve_device("mi355x")) == ()
    (rejection,) = check(ocp.capabilities, spec, resolve_device("mi300x"))
    assert rejection.field == "fp8 format" and "fnuz" in rejection.wanted


def test_ties_are_broken_by_name_and_one_backend_for_both_is_preferred() -> None:
    first, second = backend("A", 50), backend("B", 50)
    assert choose(second, first).prefill == choose(first, second).prefill == "A"
    both = choose(first, second)
    assert both.prefill == both.decode


def test_a_backend_says_what_would_bring_a_feature() -> None:
    claims = backend("OTHER_BUILD", remedies={"alibi": "build it with ALiBi"}).capabilities
    (rejection,) = check(claims, LLAMA.replace(alibi=True), H100, "prefill")
    assert rejection.remedy == "build it with ALiBi" and "(build it with ALiBi)" in str(rejection)
    with pytest.raises(ValueError, match=r"Capabilities.remedies: unknown \['albi'\]"):
        backend("MISSPELT", remedies={"albi": "build it with ALiBi"})


@pytest.mark.parametrize(("prefills", "decodes"), [("ABCD", "DBE"), ("A", "BCA"), ("CAB", "B")])
def test_pairs_come_by_the_sum_of_their_ranks(prefills: str, decodes: str) -> None:
    """At a tie one backend for both comes first, then the better decode."""
    known = {name: backend(name) for name in "ABCDE"}
    ranks = product(enumerate(prefills), enumerate(decodes))

    def order(pair: tuple[tuple[int, str], tuple[int, str]]) -> tuple[int, bool, int]:
        (p, prefill), (d, decode) = pair
        return p + d, prefill != decode, d

    wanted = sorted(ranks, key=order)
    pairs = _by_rank(*([known[name] for name in names] for names in (prefills, decodes)))
    assert [(p.name, d.name) for p, d in pairs] == [(p, d) for (_, p), (_, d) in wanted]
