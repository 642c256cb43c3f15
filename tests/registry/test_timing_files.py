"""Where do tables of times come from, and what is said of a file that is none?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from polyattn import Device, LatentSpec, LayerSpec, resolve_device, settings
from polyattn.errors import SettingsError
from polyattn.registry.discovery import refresh
from polyattn.registry.timings import HEADS, Timings, read_table, timings
from polyattn.spec.timing import KINDS, TERMS


def test_a_file_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_TIMINGS", "/nowhere/timings.json")
    with pytest.raises(SettingsError, match="'/nowhere/timings.json' .*; no such file"):
        settings.reload()
    monkeypatch.delenv("POLYATTN_TIMINGS")


@pytest.mark.parametrize("text", ["[]", '{"format": 99}', '{"format": 1}', "[" * 100_000, "\0"])
def test_what_is_no_table_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=f"{path}: .*; measure again: polyattn tune"):
        read_table(path)


def test_nobodys_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "home", nobody)
    refresh()
    assert all(
        Path(t.path).name != "timings.json" for t in timings(settings.current_settings()).tables
    )


def table(**fields: object) -> dict[str, object]:
    return {
        "format": 1, "device": {"platform": "cpu", "name": "x"}, "versions": {"torch": "1"},
        "models": [],
    } | fields  # fmt: skip


MODEL = {
    "backend": "TORCH_SDPA", "kind": KINDS[0], "layer": {}, "of": ["torch"],
    "coefficients": dict.fromkeys(TERMS, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"coefficients": dict.fromkeys(TERMS, 10**400)},
        {"of": [["torch"]]},
        {"of": [{"torch": 1}]},
        {"margin": 10**400},
        {"whole": 10**400},
        {"by_run": 1},
    ],
    ids=["a coefficient of 400 digits", "of a list", "of a dict", "margin", "whole", "by run"],
)
def test_a_model_that_cannot_be_read_is_named_and_left_out(
    wrong: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(models=[MODEL | wrong, MODEL])))
    found = read_table(path)
    assert len(found.entries) == 1
    (problem,) = found.problems
    assert problem.startswith("models[0]: ") and len(problem) < 600


def test_too_many_models_are_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(models=[{}] * 120_000)))
    with pytest.raises(SettingsError, match=r"120000 models are more than 4096"):
        read_table(path)
    path.write_text(" " * (9 << 20))
    with pytest.raises(SettingsError, match=r"it has more than 8388608 bytes"):
        read_table(path)


def test_a_fifo_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    os.mkfifo(path)
    with pytest.raises(SettingsError, match="it is no regular file"):
        read_table(path)


def measured(name: str, *classes: dict[str, object], arch: str = "sm_90") -> dict[str, object]:
    layer = {"kind": "attention", "dtype": "bfloat16", "stored": "bfloat16"}
    device = {"platform": "cuda", "arch": arch, "name": name}
    models = [
        MODEL
        | {
            "backend": f"{name}{c['head_size']}",
            "layer": layer | {"v_head_size": c["head_size"]} | c,
        }
        for c in classes
    ]
    return table(device=device, models=models, versions={})


def test_a_table_hides_no_others_kinds_of_steps(tmp_path: Path) -> None:
    """A tune of one layer that is stopped early fits its decodes alone: the next table has the rest.

    On an H200 priorities instead of its prompts', chunks' and mixed steps' times leave half of such steps
    above 1.10 of the best.
    """
    device = {"platform": "cuda", "arch": "sm_90", "name": "X"}
    paths = []
    for name, kinds in (("OWN", ["decode"]), ("CARRIED", ["low", "dealt", *KINDS[:4]])):
        models = [MODEL | {"backend": name, "kind": kind} for kind in kinds]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(table(device=device, models=models, versions={})))
    tables = Timings(tuple(map(read_table, paths)))
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=128)
    found = tables.models(spec, Device("cuda", "sm_90", "X"))
    # How decodes' keys are dealt out belongs to decodes.
    rest = [("CARRIED", kind) for kind in ("low", "short", "prefill", "chunked")]
    assert [(m.backend, m.kind) for m in found] == [("OWN", "decode"), *rest]


def test_a_layer_of_a_class_that_no_table_has(tmp_path: Path) -> None:
    """It is judged by the nearest class of the architecture's chips."""
    written = (
        measured("X", {"head_size": 128}, {"head_size": 64, "stored": "fp8_e4m3"}),
        measured("Y", {"head_size": 128}, {"head_size": 64}),
        measured("Z", {"head_size": 80}, arch="sm_80"),
    )
    paths = [tmp_path / f"{at}.json" for at in range(len(written))]
    for path, data in zip(paths, written, strict=True):
        path.write_text(json.dumps(data))
    tables = Timings(tuple(map(read_table, paths)))

    def found(device: str, arch: str = "sm_90", platform: str = "cuda", **changes: object) -> str:
        spec = LayerSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 128} | changes)  # type: ignore[arg-type]
        names = [m.backend for m in tables.models(spec, Device(platform, arch, device))]
        return "".join(names)

    assert found("X") == found("other") == "X128"
    assert found("Y") == found("Y", dtype="float16") == "Y128"
    assert found("X", head_size=64) == found("X", head_size=48) == "Y64"
    assert found("X", head_size=96) == "X128" and found("X", head_size=256) == "X128"
    assert found("Z", "sm_80", head_size=128) == "Z80" and not found("Z", "sm_80", head_size=512)
    assert found("X", kv_cache_dtype="int8") == "X64" and not found("X", dtype="float32")
    assert not found("X", batch_invariant="steps", head_size=64)
    assert not found("X", "sm_80", platform="cpu") and not found("other", "sm_100")


def test_latents_are_judged_by_as_many_heads(tmp_path: Path) -> None:
    """Up to 32 heads, up to 64 and more run other kernels. A model without heads is of any number."""
    layer = {"kind": "mla", "dtype": "bfloat16", "stored": "bfloat16", "head_size": 192}
    layer |= {"v_head_size": 128}
    models = [
        *(MODEL | {"backend": f"UP_TO_{n}", "layer": layer | {"heads": n}} for n in HEADS),
        MODEL | {"backend": "DRAFTS", "kind": "short", "layer": layer},
    ]
    device = {"platform": "cuda", "arch": "sm_90", "name": "X"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table(device=device, models=models, versions={})))
    tables = Timings((read_table(path),))

    def found(heads: int, name: str = "X", **changes: object) -> set[str]:
        latent = LatentSpec(rank=512, rope_head_size=64)
        spec = LayerSpec(
            kind="mla", num_heads=heads, head_size=192, v_head_size=128, latent=latent
        ).replace(**changes)
        return {m.backend for m in tables.models(spec, Device("cuda", "sm_90", name))}

    for heads, most in ((16, 32), (32, 32), (33, 64), (64, 64), (65, 128), (256, 128)):
        assert found(heads) == found(heads, "another chip") == {f"UP_TO_{most}", "DRAFTS"}
        assert found(heads, dtype="float16") == {f"UP_TO_{most}", "DRAFTS"}


def test_a_named_table_of_another_machine_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that changes nothing: the table's device is neither this one nor of its architecture."""
    path = tmp_path / "t.json"
    there = {"platform": "cuda", "name": "NVIDIA H200", "arch": "sm_90"}
    path.write_text(json.dumps(table(device=there)))
    monkeypatch.setenv("POLYATTN_TIMINGS", str(path))
    spec = LayerSpec(num_heads=4, head_size=64)
    found = timings(settings.current_settings())
    for name, ignored in (("cpu", True), ("b200", True), ("h200", False), ("h100", False)):
        notes = found.notes(spec, resolve_device(name), ())
        assert any("ignored: it is of NVIDIA H200" in note for note in notes) == ignored, name
