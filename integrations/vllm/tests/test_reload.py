"""Weights that vLLM loads again in place: its source is read, its classes are stood in for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import polyattn
import pytest
import torch


class Names(type):
    """A class whose attributes are their own names, and which takes type arguments."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Module(ModuleType):
    """Has any name, as a class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "get_current_vllm_config_or_none":
            return lambda: None
        return Names(name, (), {"__init__": lambda self, *args: None})


class Finder:
    """Finds modules of vLLM's, whatever their names."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "vllm":
            return importlib.util.spec_from_loader(name, Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec: Any) -> ModuleType:
        return Module(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


@pytest.fixture
def impl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our class, over vLLM's own classes where it is installed."""
    if importlib.util.find_spec("vllm") is not None:
        from polyattn_vllm.attention import PolyattnImpl

        yield PolyattnImpl
        return
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    try:
        from polyattn_vllm.attention import PolyattnImpl

        yield PolyattnImpl
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("vllm", "polyattn_vllm"):
                del sys.modules[name]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_that_are_loaded_again_count(impl: Any, dtype: torch.dtype) -> None:
    """A reload copies them through `.data`, into the tensor that our layer has; graphs read its copy."""
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    ours = impl(4, 64, 0.125, 2, kv_cache_dtype="auto", sinks=sinks)
    ours.process_weights_after_loading(torch.float32)  # of the first load, before there is a layer
    spec = polyattn.LayerSpec(
        num_heads=4, num_kv_heads=2, head_size=64, dtype="float32", learned_sinks=True
    )
    layer = ours.attach(SimpleNamespace(), polyattn.LayerGroup(polyattn.select(spec)))
    read = layer.sinks.current()
    sinks.data.copy_(torch.arange(4))
    ours.process_weights_after_loading(torch.float32)
    assert read.tolist() == layer.sinks.current().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert read.data_ptr() == layer.sinks.current().data_ptr()
