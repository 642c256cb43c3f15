"""Runs flash-attention's own tests on the CPU with polyattn's functions in place of its kernels.

    python integrations/flash_attn/tests/upstream.py CHECKOUT 2000 [pytest's arguments]

`CHECKOUT` is a clone of https://github.com/Dao-AILab/flash-attention (the tests of commit 0251105a were
run); nothing of it is built or copied here. 2000 is how many tests to choose, at random, as many of each
function. Tensors that a test asks for on "cuda" are made on the CPU. Left out: dropout, whose random
numbers are the kernel's own, ALiBi without a causal mask, sizes that a CPU takes minutes for, and what
tests the CUDA extension itself.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import polyattn_flash_attn
import pytest
import torch
from torch.overrides import TorchFunctionMode

LARGEST = 300 * 300
"""Query times key tokens of a test that is run."""
HEAD_SIZES = (32, 59, 128)
KERNELS_OWN = (
    "generator_arg", "num_splits", "race_condition", "deterministic", "bwd_transpose", "overflow",
)  # fmt: skip


class OnTheCPU(TorchFunctionMode):
    """Sends every tensor that is asked for on a GPU to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def rotary(x: Any, cos: Any, sin: Any, seqlen_offsets: Any = 0, interleaved: bool = False) -> Any:
    """Rotate (batch, seqlen, heads, size) by complex numbers: what the tests compare with."""
    batch, seqlen, half = x.shape[0], x.shape[1], cos.shape[1]
    offset = torch.as_tensor(seqlen_offsets).expand(batch)
    at = offset[:, None] + torch.arange(seqlen)
    turn = torch.complex(cos.float(), sin.float())[at][:, :, None]
    part, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    whole = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([whole.to(x.dtype), rest], -1)


class Plugin:
    """Leaves out what doesn't fit before pytest makes half a million tests of it; runs on the CPU."""

    def __init__(self, most: int):
        self.most = most

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        for mark in metafunc.definition.own_markers:
            if mark.name == "parametrize":
                names = [name.strip() for name in mark.args[0].split(",")]
                mark.args[1][:] = [value for value in mark.args[1] if fits(names, value)]

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        kept = [
            item
            for item in items
            if not any(word in item.name for word in KERNELS_OWN)
            and not (item.callspec.params.get("alibi") and not item.callspec.params.get("causal"))
        ]
        random.Random(0).shuffle(kept)
        functions = Counter(item.originalname for item in kept)
        share = max(1, self.most // len(functions))
        taken: Counter[str] = Counter()
        items[:] = []
        for item in kept:
            taken[item.originalname] += 1
            if taken[item.originalname] <= share:
                items.append(item)
        config.hook.pytest_deselected(items=kept[len(items) :])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        with OnTheCPU():
            return (yield)


def fits(names: list[str], value: Any) -> bool:
    """Whether a value of a test's parameters is one that a CPU runs."""
    given = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
    lens = [given.get(n, given.get("seqlen", 1)) for n in ("seqlen_q", "seqlen_k")]
    return not (
        given.get("dropout_p")
        or given.get("deterministic")
        or given.get("d", 32) not in HEAD_SIZES
        or lens[0] * lens[1] > LARGEST
    )


def main(checkout: str, most: str, *args: str) -> int:
    """Run `most` tests, chosen at random, and return pytest's status."""
    torch.set_num_threads(1)
    polyattn_flash_attn.install()
    layers, found = ModuleType("flash_attn.layers"), ModuleType("flash_attn.layers.rotary")
    found.apply_rotary_emb = rotary  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn.layers": layers, "flash_attn.layers.rotary": found}
    interface: Any = sys.modules["flash_attn.flash_attn_interface"]
    interface._get_block_size_n, interface.USE_TRITON_ROCM = lambda *_: 64, False
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: type("H100", (), {"total_memory": 80 << 30})
    torch.cuda.synchronize = lambda *_: None
    test = str(Path(checkout) / "tests" / "test_flash_attn.py")
    return int(
        pytest.main(
            ["-p", "no:cacheprovider", "--rootdir", "/tmp", test, *args], [Plugin(int(most))]
        )
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
