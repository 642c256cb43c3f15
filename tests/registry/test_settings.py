from __future__ import annotations

import math
from pathlib import Path

import pytest
from defaults import CPU_DEFAULT
from fakes import LLAMA
from polyattn import PolyattnError, select, settings
from polyattn.errors import SettingsError
from polyattn.registry.capabilities import Capabilities
from polyattn.settings import Settings, load


def test_precedence_argument_then_variable_then_file() -> None:
    values = load({"POLYATTN_BACKEND": "B"}, {"backend": "C"}, "polyattn.toml")
    assert values.override(LLAMA, "decode").backend == "B"  # type: ignore[union-attr]
    assert values.notes == (
        "POLYATTN_BACKEND=B wins over polyattn.toml: backend=C, where both name a backend",
    )
    over = values.with_backend("prefill=A", "flag --backend")
    assert over.override(LLAMA, "prefill").backend == "A"  # type: ignore[union-attr]
    assert over.override(LLAMA, "decode").backend == "B"  # type: ignore[union-attr]
    values = load({"POLYATTN_LAYOUT": "NHD"}, {"layout": "HND"}, "polyattn.toml")
    assert values.layout == "NHD"
    assert values.notes == ("POLYATTN_LAYOUT=NHD wins over polyattn.toml: layout=HND",)
    assert not load({"POLYATTN_LAYOUT": "NHD"}, {"layout": "NHD"}, "polyattn.toml").notes
    only_file = load({}, {"backend": {"decode": "C"}}, "polyattn.toml")
    assert not only_file.notes
    assert only_file.override(LLAMA, "decode").source == "polyattn.toml"  # type: ignore[union-attr]
    assert only_file.override(LLAMA, "prefill") is None


@pytest.mark.parametrize(
    ("environ", "config", "says"),
    [
        (
            {"POLYATTN_BACKND": "X"},
            {},
            "POLYATTN_BACKND has no effect; did you mean 'POLYATTN_BACKEND'",
        ),
        (
            {"POLYATTN_BATCH_INVARIANT": "1"},
            {},
            "POLYATTN_BATCH_INVARIANT has no effect; valid: POLYATTN_",
        ),
        ({"POLYATN_BACKEND": "X"}, {}, "did you mean 'POLYATTN_BACKEND'"),
        ({"polyattn_backend": "X"}, {}, "polyattn_backend has no effect; did you mean"),
        ({"POLYATTN_BACKEND": "prefil=X"}, {}, "scope 'prefil' is unknown; did you mean 'prefill'"),
        ({"POLYATTN_BACKEND": ""}, {}, "is empty"),
        ({"POLYATTN_BACKEND": "decode="}, {}, "names no backend"),
        ({"POLYATTN_BACKEND": "A,B"}, {}, "keep one"),
        ({"POLYATTN_LAYOUT": "NDH"}, {}, "POLYATTN_LAYOUT='NDH'"),
        ({"POLYATTN_VERIFY": "maybe"}, {}, "POLYATTN_VERIFY='maybe' must be 1 or 0"),
        ({"POLYATTN_PROBE_TIMEOUT": "-1"}, {}, "POLYATTN_PROBE_TIMEOUT='-1'"),
        ({}, {"bakend": "X"}, "polyattn.toml: key 'bakend' is unknown; did you mean 'backend'"),
        ({}, {"layout": 3}, "polyattn.toml: layout=3"),
        ({}, {"backend": 3}, "backend=3"),
        ({}, {"backend": {"decode": 3}}, "backend.decode=3 must be a backend's name"),
        ({}, {"backend": {"decode": "A,B=C"}}, "must be a backend's name"),
        ({}, {"backend": {"mla": {"decode": []}}}, "backend.mla.decode=[]"),
        ({"POLYATTN_BACKEND": "prefill.decode=X"}, {}, "names a phase twice"),
        ({"POLYATTN_BACKEND": "mla.mamba2=X"}, {}, "names a kind twice"),
        ({"POLYATTN_BACKEND": "encoder.cross=X"}, {}, "names a role twice"),
        ({"POLYATTN_BACKEND": "decode.decode=X"}, {}, "names a phase twice"),
        ({"VLLM_USE_FLASHINFER": "maybe"}, {}, "VLLM_USE_FLASHINFER='maybe' must be 1 or 0"),
        (
            {"VLLM_USE_FLASHINFER": "maybe", "VLLM_ATTENTION_BACKEND": "X"},
            {},
            "VLLM_USE_FLASHINFER='maybe' must be 1 or 0",
        ),
        ({"POLYATTN_PLUGIN_TIMEOUT": "1e9"}, {}, "3600 at most"),
        ({}, {"probe_timeout": True}, "polyattn.toml: probe_timeout=True"),
        ({}, {"plugins": 3}, "polyattn.toml: plugins=3"),
        ({"POLYATTN_MULTI_BLOCK": "-5"}, {}, "POLYATTN_MULTI_BLOCK='-5' must be a number of keys"),
        ({}, {"multi_block": True}, "polyattn.toml: multi_block=True must be a number of keys"),
    ],
)
def test_bad_settings_are_named(
    environ: dict[str, str], config: dict[str, object], says: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ, config, "polyattn.toml")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("probe_timeout", "1"),
        ("probe_timeout", None),
        ("plugin_timeout", math.nan),
        ("plugin_timeout", True),
        ("multi_block", -1),
        ("multi_block", "128"),
        ("multi_block", True),
        ("timings", 0),
        ("plugins", (1,)),
        ("sources", "TORCH_SDPA"),
        ("sources", ("TORCH_SDPA",)),
    ],
)
def test_settings_made_by_hand_are_checked_as_variables_are(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"Settings\.{name}="):
        Settings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["mla=NOPE", "prefill.mla=NOPE", "encoder=NOPE", "store=NOPE"])
def test_a_name_that_nobody_has_is_an_error_for_every_layer(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the model has a layer that it speaks of or not."""
    with pytest.raises(SettingsError, match="argument backend: backend 'NOPE' is unknown"):
        select(LLAMA, "cpu", backend=text)
    monkeypatch.setenv("POLYATTN_BACKEND", text)
    with pytest.raises(SettingsError, match="POLYATTN_BACKEND: backend 'NOPE' is unknown"):
        select(LLAMA, "cpu")


def test_foreign_variables_are_honoured_with_a_note() -> None:
    values = load({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN_VLLM_V1"}, {}, "")
    assert values.override(LLAMA, "decode").backend == "FLASH_ATTN"  # type: ignore[union-attr]
    assert "alias" in values.notes[0]
    old = load({"VLLM_USE_FLASHINFER": "1", "POLYATTN_BACKEND": "A"}, {}, "")
    assert old.override(LLAMA, "decode").backend == "A"  # type: ignore[union-attr]
    assert any("deprecated" in note for note in old.notes)
    assert any("gives way to POLYATTN_BACKEND" in note for note in old.notes)
    both = load({"VLLM_USE_FLASHINFER": "1", "VLLM_ATTENTION_BACKEND": "A"}, {}, "")
    assert both.override(LLAMA, "decode").backend == "A"  # type: ignore[union-attr]
    assert any("VLLM_USE_FLASHINFER gives way to VLLM_ATTENTION_BACKEND" in n for n in both.notes)


def test_tensorrt_llms_xqa_is_a_decoders_decode_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = load({"TRTLLM_FORCE_XQA": "1", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}, {}, "")
    assert values.override(LLAMA, "decode").backend == "FLASHINFER_TRTLLM"  # type: ignore[union-attr]
    assert values.override(LLAMA, "prefill").backend == "FLASH_ATTN"  # type: ignore[union-attr]
    assert [note.partition(" ")[0] for note in values.notes] == [
        "TRTLLM_FORCE_XQA", "VLLM_ATTENTION_BACKEND",
    ]  # fmt: skip
    assert all("alias" in note for note in values.notes)
    monkeypatch.setenv("TRTLLM_FORCE_XQA", "1")
    decision = select(LLAMA, "h200").decision
    assert decision.decode == "FLASHINFER_TRTLLM" != decision.prefill
    assert any("TRTLLM_FORCE_XQA" in note for note in decision.notes)
    # As in TensorRT-LLM, where it can serve; else a note says why.
    capped = select(LLAMA.replace(logit_soft_cap=30.0), "h200").decision
    assert capped.decode != "FLASHINFER_TRTLLM"
    assert any("names FLASHINFER_TRTLLM for decode, which can't" in note for note in capped.notes)
    assert any("logit_soft_cap: wanted" in note for note in capped.notes)
    assert select(LLAMA, "x86-amx").decision.decode != "FLASHINFER_TRTLLM"
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", "cuda")
    assert any(
        "'FLASHINFER_TRTLLM' isn't here" in n for n in select(LLAMA, "x86-amx").decision.notes
    )
    with pytest.raises(SettingsError, match="'FLASHINFER_TRTLLM' isn't here"):
        select(LLAMA, "x86-amx", backend="FLASHINFER_TRTLLM")


@pytest.mark.parametrize("word", ["no", "No", "off", "false", "0", ""])
@pytest.mark.parametrize("variable", ["VLLM_USE_FLASHINFER", "TRTLLM_FORCE_XQA"])
def test_no_means_no(variable: str, word: str) -> None:
    assert load({variable: word}, {}, "").sources == ()


def test_a_table_in_a_table_is_a_scope_with_a_dot() -> None:
    values = load({}, {"backend": {"mla": {"decode": "X"}, "prefill": "Y"}}, "polyattn.toml")
    assert [str(o) for o in values.sources[0]] == ["decode.mla=X", "prefill=Y"]


@pytest.mark.parametrize("key", ["plugins", "disable_plugins"])
def test_a_wrong_key_of_the_file_is_not_blamed_on_a_variable(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.toml"
    path.write_text(f'{key} = ["cpuu"]')
    monkeypatch.setenv("POLYATTN_CONFIG", str(path))
    with pytest.raises(PolyattnError) as caught:
        select(LLAMA, "cpu")
    assert f"{path}: {key}: no plugin 'cpuu'" in str(caught.value)
    assert "POLYATTN_" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a = " + b"[" * 20_000, "can't be read as TOML"),
        (b"\xff", "can't be read as TOML"),
        (b"a = " + b"9" * 5000, "can't be read as TOML"),
        (b'\xef\xbb\xbflayout = "NDH"', "layout='NDH'"),
        (rb'timings = "C:\Users\t.json"', r"write \ within single quotes: 'C:\folder'"),
        (rb"timings = 'C:\Users\t.json'", r"timings='C:\\Users\\t.json' must be the file"),
    ],
)
def test_odd_configuration_files(
    data: bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(data)
    monkeypatch.setenv("POLYATTN_CONFIG", str(path))
    with pytest.raises(SettingsError) as caught:
        settings.reload()
    assert says in str(caught.value)
    monkeypatch.setenv("POLYATTN_CONFIG", str(tmp_path))
    with pytest.raises(SettingsError, match="not a regular file"):
        settings.reload()


def test_a_changed_variable_is_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(LLAMA, "cpu").decision.decode == CPU_DEFAULT
    monkeypatch.setenv("POLYATTN_BACKEND", "FLEX_ATTENTION")
    assert select(LLAMA, "cpu").decision.decode == "FLEX_ATTENTION"
    monkeypatch.delenv("POLYATTN_BACKEND")
    assert select(LLAMA, "cpu").decision.decode == CPU_DEFAULT


def test_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[backend]\ndecode = "FLEX_ATTENTION"\n')
    monkeypatch.setenv("POLYATTN_CONFIG", str(path))
    assert select(LLAMA, "cpu").decision.decode == "FLEX_ATTENTION"
    path.write_text("not toml")
    with pytest.raises(SettingsError, match="TOML"):
        settings.reload()
    monkeypatch.setenv("POLYATTN_CONFIG", str(tmp_path / "absent"))
    with pytest.raises(SettingsError, match="no such file"):
        settings.reload()


def test_disabled_and_unknown_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", "cpuu")
    with pytest.raises(PolyattnError, match="did you mean 'cpu'"):
        select(LLAMA, "x86-amx")
    monkeypatch.setenv("POLYATTN_DISABLE_PLUGINS", "cpu,hpu")
    with pytest.raises(
        PolyattnError,
        match="'x86-amx' isn't here: polyattn-cpu has it, but its plugin is disabled or broken",
    ):
        select(LLAMA, "x86-amx")
    with pytest.raises(PolyattnError, match="no installed plugin finds device 'cpu'"):
        select(LLAMA, "cpu")


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"dtypes": frozenset()}, "dtypes is empty"),
        ({"platforms": {}}, "platforms is empty"),
        ({"features": frozenset({"magic"})}, "unknown ['magic']"),
        ({"phases": frozenset({"mixed"})}, "'mixed' needs both"),
        ({"features": frozenset({"causal", "sink_tokens"})}, "needs 'sliding_window'"),
        ({"features": frozenset({"gqa"})}, "'causal', 'non_causal' or both"),
        ({"dtypes": {"float32"}}, "Capabilities.dtypes={'float32'} is of type set"),
        ({"kinds": frozenset({"gdn", "mla"})}, "; write AttentionKind.GDN, AttentionKind.MLA"),
        ({"fp8_compute": 1}, "Capabilities.fp8_compute=1 is of type int; it must be bool"),
        ({"excludes": ((frozenset({"alibi", "decoed"}), ""),)}, "'decode'"),
    ],
)
def test_contradictory_claims(claims: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        Capabilities(**({"platforms": {"cpu": ()}} | claims))  # type: ignore[arg-type]
    assert says in str(caught.value)
