"""Runs the backend under SGLang's own registry, base class and RadixAttention, as far as they import.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-0.5.23-*.whl -d sglang-source
    pip install msgspec orjson psutil pybase64 pyzmq setproctitle fastapi uvicorn aiohttp ipython \
        requests triton dill sentencepiece pillow transformers==5.23.0
    python integrations/sglang/tests/own_layers.py sglang-source

Packages of kernels (sgl_kernel, torchvision, tvm_ffi) are stood in for by names that nothing is asked
of: SGLang imports them wherever it looks at attention. Its launcher, model runner and memory pools
aren't run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import polyattn_sglang
import torch

KERNELS = ("torchvision", "sgl_kernel", "tvm_ffi")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of kernels: modules that have every name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for what is a package of kernels."""
        if name.partition(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Return a module that has every name; what is derived from has to be a class."""
        return MagicMock(
            name=spec.name, __spec__=spec, __path__=[], __version__="99.0", Object=type("O", (), {})
        )

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


def registered() -> Any:
    """Register by the plugin's entry point. Returns the backend that SGLang's registry makes."""
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="sglang.srt.plugins", name="polyattn")
    entry.load()()
    choices = importlib.import_module("sglang.srt.arg_groups.choices")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend")
    assert "polyattn" in choices.ATTENTION_BACKEND_CHOICES
    assert "polyattn" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert registry.ATTENTION_BACKENDS["polyattn"] is polyattn_sglang.create
    from test_sglang import Served

    fields = importlib.import_module("sglang.srt.arg_groups.arg_utils").namespace_of(
        importlib.import_module("sglang.srt.server_args").ServerArgs
    )
    assert fields["enable_deterministic_inference"] == "exec.deterministic"
    found = SimpleNamespace(enable_deterministic_inference=True)  # what SGLang's launcher publishes
    running = importlib.import_module("sglang.srt.runtime_context")
    running.get_exec = lambda: SimpleNamespace(deterministic=found)  # type: ignore[attr-defined]
    served = Served()
    backend = registry.ATTENTION_BACKENDS["polyattn"](served.runner)
    assert isinstance(backend, base.AttentionBackend)
    served.backend = backend
    return served


def attended(served: Any) -> None:
    """Chunked prefills and decodes through SGLang's own layers, held to the formula in float64."""
    from test_sglang import formula

    layers = importlib.import_module("sglang.srt.layers.radix_attention")
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    batches = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    served.mode = batches.ForwardMode.__getitem__
    own = layers.RadixAttention(4, 16, 0.3, 2, 0)
    for counts in ([5, 9], [7, 3], [1, 1], [1, 4], [1, 1]):
        with context.forward_context(context.ForwardContext(attn_backend=served.backend)):
            out, queries = served.step(counts, own, through=own)
        found = out.unflatten(1, (4, -1)).split([*counts, 0])
        for row in range(2):
            wanted = formula(queries[row], served.keys[row], served.values[row], own)
            torch.testing.assert_close(found[row].double(), wanted, rtol=1e-5, atol=1e-5)
        print(f"new tokens {counts}: equal", flush=True)


@torch.no_grad()
def main(source: str) -> None:
    """Run all; the first difference is an AssertionError."""
    sys.meta_path.insert(0, Stubs())
    sys.path.insert(0, source)
    attended(registered())
    print(polyattn_sglang.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
