"""Runs libraries' own tests on the CPU with polyattn's functions in place of their kernels.

    python tests/upstream/run.py LIBRARY CHECKOUT MOST [pytest's arguments]

`LIBRARY` is one of `LIBRARIES`, `CHECKOUT` a clone of its repository, and `MOST` how many tests to
choose, at random, as many of each function. Nothing of the checkout is built or copied; its Python files
give the references that the tests compare with. The tests need `pip install einops`. Tensors that a test
asks for on "cuda" are made on the CPU. Left out are sizes that a CPU takes minutes for, what tests the
kernels themselves or functions that the drop-ins don't have, and what flash-attn's page says is refused:
dropout, ALiBi without a causal mask, qv and fp8. The recurrences are forward only: there `backward` does
nothing, gradients read as 0 on both sides, and such a test counts as "forward only". A test that ends in
a `PolyattnError` counts as refused, and its message is printed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import polyattn_flash_attn
import polyattn_recurrent
import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, PolyattnError, select
from polyattn_flash_attn import flash_attn_2
from torch.overrides import TorchFunctionMode


class OnTheCPU(TorchFunctionMode):
    """Sends every tensor that is asked for on a GPU to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        named = {n: "cpu" if _is_cuda(value) else value for n, value in (kwargs or {}).items()}
        return func(*args, **named)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class ForwardOnly(OnTheCPU):
    """Skips every backward, and gives 0 for each gradient."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.backward:
            self.asked = True
            return None
        if func == torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
            return torch.zeros_like(args[0])
        return super().__torch_function__(func, types, args, kwargs)


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


def flash_attention(checkout: Path) -> None:
    """Install both versions' functions, and what the tests ask a GPU for."""
    polyattn_flash_attn.install()
    sys.path.append(str(checkout / "hopper"))  # helpers of version 3's tests
    layers, found = ModuleType("flash_attn.layers"), ModuleType("flash_attn.layers.rotary")
    found.apply_rotary_emb = rotary  # type: ignore[attr-defined]
    sys.modules |= {"flash_attn.layers": layers, "flash_attn.layers.rotary": found}
    interface: Any = sys.modules["flash_attn.flash_attn_interface"]
    interface._get_block_size_n, interface.USE_TRITON_ROCM = lambda *_: 64, False
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: type("H100", (), {"total_memory": 80 << 30})
    torch.cuda.synchronize = lambda *_: None


def vllm(checkout: Path) -> None:
    """Install what vLLM's test of FlashAttention over pages imports, and no more of vLLM."""

    def own(given: dict[str, Any]) -> Any:
        """Take what only vLLM's functions have out of a call; return where its result goes."""
        scales = [given.pop(f"{name}_descale", None) for name in "qkv"]
        assert given.pop("fa_version") == 2 and scales == [None] * 3
        return given.pop("out")

    def varlen(q: Any, k: Any, v: Any, *, seqused_k: Any, **given: Any) -> Any:
        starts, out = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int(), own(given)
        found = flash_attn_2.flash_attn_varlen_func(q, k, v, cu_seqlens_k=starts, **given)
        return found if out is None else out.copy_(found)

    def with_kvcache(**given: Any) -> Any:
        out, found = own(given), flash_attn_2.flash_attn_with_kvcache(**given)
        return found if out is None else out.copy_(found)

    seeds = staticmethod(torch.manual_seed)
    module("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)
    module("vllm.platforms", current_platform=type("Platform", (), {"seed_everything": seeds}))
    module(
        "vllm.vllm_flash_attn", flash_attn_varlen_func=varlen, flash_attn_with_kvcache=with_kvcache,
        is_fa_version_supported=lambda version: version == 2,
        fa_version_unsupported_reason=lambda _: "another version's functions take its place",
    )  # fmt: skip
    torch.set_default_device = lambda *_: None


def module(name: str, **values: Any) -> None:
    """Install a module of these values, and the packages that it lies in."""
    for parent in itertools.accumulate(name.split("."), "{}.{}".format):
        sys.modules.setdefault(parent, ModuleType(parent)).__dict__.setdefault("__path__", [])
    sys.modules[name].__dict__.update(values)


def pages(
    num_blocks: int, block_size: int, layers: int, heads: int, size: int, kind: str,
    dtype: torch.dtype, seed: int, device: str,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
    """Return random caches as vLLM's paged kernels have them: keys in parts of 16 bytes."""
    torch.manual_seed(seed)
    stored = torch.float8_e4m3fn if kind == "fp8" else dtype
    bound, part = size**-0.5, 16 // stored.itemsize

    def drawn(*shape: int) -> torch.Tensor:
        found = torch.empty(num_blocks, heads, *shape, dtype=dtype).uniform_(-bound, bound)
        return found.to(stored).view(torch.uint8) if kind == "fp8" else found

    keys = [drawn(size // part, block_size, part) for _ in range(layers)]
    return keys, [drawn(size, block_size) for _ in range(layers)]


def paged_attention(
    out: Any, query: Any, keys: Any, values: Any, heads: int, scale: float, table: Any, lens: Any,
    block_size: int, longest: int, slopes: Any, kind: str, k_scale: Any, v_scale: Any,
) -> None:  # fmt: skip
    """Decode over vLLM's pages by a layer whose cache holds the same bytes."""
    blocks, inverse = table[:, : -(-longest // block_size)].unique(return_inverse=True)
    spec = LayerSpec(
        num_heads=query.shape[1], num_kv_heads=heads, head_size=query.shape[2], scale=scale,
        dtype=str(query.dtype).removeprefix("torch."), block_size=block_size,
        alibi=slopes is not None, kv_cache_dtype="fp8_e4m3" if kind == "fp8" else "auto",
    )  # fmt: skip
    scales = {"k_scale": float(k_scale), "v_scale": float(v_scale)} if kind == "fp8" else {}
    layer = Attention(LayerGroup(select(spec, "cpu")), alibi_slopes=slopes, **scales)
    cache = layer.group.allocate_cache(len(blocks))
    dtype = cache.key.dtype
    cache.key.copy_(keys[blocks].permute(0, 3, 1, 2, 4).flatten(3).contiguous().view(dtype))
    cache.value.copy_(values[blocks].permute(0, 3, 1, 2).contiguous().view(dtype))
    batch = Batch(list(range(len(lens) + 1)), lens, inverse.int())
    layer(query, None, None, cache, batch, out=out)


def vllm_paged(checkout: Path) -> None:
    """Install what vLLM's test of its paged kernels imports, and no more of vLLM."""

    def v2(out: Any, _sums: Any, _most: Any, _parts: Any, *given: Any) -> None:
        paged_attention(out, *given)

    def rocm(out: Any, _sums: Any, _most: Any, _parts: Any, *given: Any) -> None:
        assert given[7] is None  # where queries start: one each
        paged_attention(out, *given[:7], *given[8:])

    def convert_fp8(to: Any, of: Any, scale: float = 1.0) -> None:
        # Element by element as they lie in memory, though the test names other parts of keys.
        to.view(-1).copy_(of.view(torch.float8_e4m3fn).view(-1).float() * scale)

    def nothing(*given: Any, **named: Any) -> None:
        """Stand for what checks the kernels' registration, and for classes of other tests."""

    yes, no = staticmethod(lambda: True), staticmethod(lambda: False)
    seeds = staticmethod(lambda seed: (random.seed(seed), torch.manual_seed(seed)))
    platform = type("Platform", (), {"is_rocm": yes, "is_navi": no, "seed_everything": seeds})
    module("vllm.platforms", current_platform=platform)
    module(
        "vllm._custom_ops", paged_attention_v1=paged_attention, paged_attention_v2=v2,
        paged_attention_rocm=rocm, convert_fp8=convert_fp8,
    )  # fmt: skip
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]  # type: ignore[attr-defined]
    for name in ("vllm.attention.layer", "vllm.model_executor.layers.attention"):
        module(name, Attention=nothing, MultiHeadAttention=nothing, MMEncoderAttention=nothing)
    module("vllm.utils.torch_utils", set_random_seed=seeds.__func__)
    module("vllm.utils.mem_utils", get_max_shared_memory_bytes=lambda: (512 + 300) * 4)
    module("tests.kernels.utils", opcheck=nothing)
    module("tests.kernels.allclose_default", get_default_atol=nothing, get_default_rtol=nothing)
    for package in ("tests", "tests.kernels"):
        sys.modules[package].__path__ = [str(checkout / package.replace(".", "/"))]
    for space, name in (("_C", "v1"), ("_C", "v2"), ("_rocm_C", "")):
        kernel = f"paged_attention_{name}".removesuffix("_")
        setattr(getattr(torch.ops, space), kernel, nothing)
    torch.set_default_device = lambda *_: None


def recurrences(checkout: Path) -> None:
    """Install the functions, and take what else a module has from the checkout."""
    polyattn_recurrent.install()
    roots = polyattn_recurrent.VERSIONS
    here = {n: checkout / n.replace(".", "/") for n in sys.modules if n.split(".")[0] in roots}
    for name, path in here.items():
        if path.is_dir():
            sys.modules[name].__path__ = [str(path)]
    for extension in ("causal_conv1d_cuda", "selective_scan_cuda"):
        sys.modules[extension] = ModuleType(extension)
    for name, path in here.items():
        if path.with_suffix(".py").is_file():
            spec = importlib.util.spec_from_file_location(f"{name}_own", path.with_suffix(".py"))
            assert spec is not None and spec.loader is not None
            own = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(own)
            sys.modules[name].__dict__.update(
                {k: v for k, v in vars(own).items() if not hasattr(sys.modules[name], k)}
            )


@dataclass(frozen=True)
class Library:
    """A library's tests: `left_out` are words in names of functions, `fits` says which values to run."""

    tests: tuple[str, ...]
    install: Callable[[Path], None]
    left_out: tuple[str, ...]
    fits: Callable[[dict[str, Any]], bool]
    forward_only: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def attention_fits(given: dict[str, Any], head_sizes: tuple[int, ...]) -> bool:
    """Whether a CPU runs values of an attention test's parameters."""
    lens = [given.get(n, given.get("seqlen", 1)) for n in ("seqlen_q", "seqlen_k")]
    return not (
        given.get("dropout_p")
        or given.get("deterministic")
        or given.get("has_qv")
        or given.get("dtype") is torch.float8_e4m3fn
        or (given.get("alibi") and not given.get("causal"))
        or given.get("d", head_sizes[0]) not in head_sizes
        or lens[0] * lens[1] > 300 * 300
    )


def recurrence_fits(given: dict[str, Any]) -> bool:
    """Whether a CPU runs values of a recurrence test's parameters."""
    return given.get("seqlen", 1) * given.get("dim", 1) <= 1 << 20 and given.get("T", 1) <= 1100


LIBRARIES = {
    "flash-attention": Library(
        ("tests/test_flash_attn.py",), flash_attention,
        ("generator_arg", "num_splits", "race_condition", "deterministic", "bwd_transpose", "overflow"),
        lambda given: attention_fits(given, (32, 59, 128)),
    ),
    "flash-attention-3": Library(
        ("hopper/test_flash_attn.py",), flash_attention,
        ("race_condition", "bw_compatibility", "linearize", "cluster"),
        lambda given: attention_fits(given, (64, 96, 128)),
    ),
    "vllm": Library(
        ("tests/kernels/attention/test_flash_attn.py",), vllm, (),
        lambda given: (
            given.get("num_blocks", 0) <= 2048 and given.get("fa_version", 2) == 2
            and given.get("q_dtype") is None),
    ),
    "vllm-paged": Library(
        ("tests/kernels/attention/test_attention.py",), vllm_paged, ("not_divis", "unsupported"),
        lambda given: (
            given.get("num_heads") != (40, 40) and given.get("device", "cuda:0") == "cuda:0"
            and given.get("head_size", 1) * given.get("block_size", 1) <= 4096),
    ),
    "causal-conv1d": Library(
        ("tests/test_causal_conv1d.py",), recurrences,
        ("get_states", "race_condition", "bwd_d"), recurrence_fits, True,
    ),
    "mamba": Library(
        ("tests/ops/test_selective_scan.py", "tests/ops/triton/test_selective_state_update.py"),
        recurrences, ("inner",), recurrence_fits, True,
    ),
    "flash-linear-attention": Library(
        ("tests/ops/test_gdn.py",), recurrences,
        ("test_gate", "fwd_h", "wy_repr", "flash_qla"), recurrence_fits, True,
        {"FLA_DISABLE_BACKEND_DISPATCH": "1"},
    ),
}  # fmt: skip


class Plugin:
    """Leaves out what doesn't fit before pytest makes half a million tests of it; runs on the CPU."""

    def __init__(self, library: Library, most: int):
        self.library, self.most = library, most
        self.results: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()

    @pytest.fixture
    def kv_cache_factory(self) -> Any:
        """What vLLM's own `conftest.py` gives."""
        return pages

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: Any) -> None:
        for mark in metafunc.definition.own_markers:
            if mark.name == "parametrize":
                names = mark.args[0] if isinstance(mark.args[0], tuple) else mark.args[0].split(",")
                names = [name.strip() for name in names]
                mark.args[1][:] = [v for v in mark.args[1] if self._fits(names, v)]

    def _fits(self, names: list[str], value: Any) -> bool:
        value = value.values if hasattr(value, "values") else value
        several = value if isinstance(value, tuple) and len(names) > 1 else (value,)
        return self.library.fits(dict(zip(names, several, strict=len(names) > 1)))

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        kept = [
            item
            for item in items
            if not any(word in item.originalname for word in self.library.left_out)
            and self.library.fits(getattr(getattr(item, "callspec", None), "params", {}))
        ]
        random.Random(0).shuffle(kept)
        functions = Counter(item.originalname for item in kept)
        share = max(1, self.most // max(1, len(functions)))
        taken: Counter[str] = Counter()
        items[:] = []
        for item in kept:
            taken[item.originalname] += 1
            if taken[item.originalname] <= share:
                items.append(item)
        chosen = set(items)
        config.hook.pytest_deselected(items=[item for item in kept if item not in chosen])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        mode = ForwardOnly() if self.library.forward_only else OnTheCPU()
        result = "failed"
        try:
            with torch.set_grad_enabled(not self.library.forward_only), mode:
                done = yield
            result = "forward only" if getattr(mode, "asked", False) else "passed"
            return done
        except pytest.skip.Exception:
            result = "skipped"
            raise
        except BaseException as error:
            # A test that waits for another error raises its own over the refusal.
            refusal = error if isinstance(error, PolyattnError) else error.__context__
            if not isinstance(refusal, PolyattnError):
                raise
            result = "refused"
            self.refusals[str(refusal)] += 1
            pytest.skip(str(refusal))
        finally:
            self.results[item.originalname, result] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        columns = ("passed", "forward only", "refused", "skipped", "failed")
        write(f"| test | {' | '.join(columns)} |")
        for function in sorted({name for name, _ in self.results}):
            write(
                f"| `{function}` | {' | '.join(str(self.results[function, c]) for c in columns)} |"
            )
        for message, count in self.refusals.most_common():
            write(f"refused {count}: {message}")


def main(name: str, checkout: str, most: str, *args: str) -> int:
    """Run `most` tests of a library, chosen at random, and return pytest's status."""
    torch.set_num_threads(1)
    library, root = LIBRARIES[name], Path(checkout).resolve()
    os.environ |= library.environment
    library.install(root)
    options = ["-p", "no:cacheprovider", "--noconftest", "--rootdir", "/tmp"]
    tests = [str(root / test) for test in library.tests]
    return int(pytest.main([*options, *tests, *args], [Plugin(library, int(most))]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
