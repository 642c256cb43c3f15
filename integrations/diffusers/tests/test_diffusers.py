"""Tiny random diffusion transformers: the same outputs as with diffusers' native backend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
import polyattn_diffusers
from diffusers import (
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)
from polyattn import PolyattnError
from polyattn_diffusers.backend import add_name, attention


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    torch.manual_seed(0)
    polyattn_diffusers.reset()
    active = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = active


def flux() -> tuple[nn.Module, dict[str, Any]]:
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([0.4, 0.7]),
        "img_ids": torch.rand(16, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


def wan() -> tuple[nn.Module, dict[str, Any]]:
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": torch.tensor([3, 8]),
        "encoder_hidden_states": torch.randn(2, 7, 16),
    }  # fmt: skip


def qwen_image() -> tuple[nn.Module, dict[str, Any]]:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_hidden_states_mask": None, "timestep": torch.tensor([0.3, 0.9]),
        "img_shapes": [(1, 4, 4)] * 2,
    }  # fmt: skip


MODELS = {"flux": flux, "wan": wan, "qwen_image": qwen_image}


def output(model: nn.Module, given: dict[str, Any]) -> Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback warns
        return model(**given, return_dict=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_native_attention_gives(name: str) -> None:
    model, given = MODELS[name]()
    model.eval()
    host: Any = model
    host.set_attention_backend("native")
    wanted = output(model, given)
    host.set_attention_backend("polyattn")
    found = output(model, given)
    assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    report = polyattn_diffusers.report()
    assert sum(report.served.values()) >= 2
    assert not report.fallbacks
    host.set_attention_backend("native")
    assert torch.equal(output(model, given), wanted)


def test_models_that_never_ask_for_a_backend_are_refused_by_name() -> None:
    """Without that, diffusers takes any name for them and goes on with torch's sdpa."""
    joint = SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=16,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    for model, processor in ((joint, "JointAttnProcessor2_0"), (unet, "AttnProcessor2_0")):
        host: Any = model
        with pytest.raises(
            PolyattnError,
            match=rf"{type(model).__name__}: {processor} of .* under polyattn_torch.SdpaMode",
        ):
            host.set_attention_backend("polyattn")
        host.set_attention_backend("native")


def test_processors_beside_those_that_ask_for_a_backend_are_named() -> None:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    given = {
        "hidden_states": torch.randn(1, 4, 1, 4, 4), "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 5, 16), "pooled_projections": torch.randn(1, 8),
        "encoder_attention_mask": torch.ones(1, 5), "guidance": torch.tensor([6.0]),
    }  # fmt: skip
    host: Any = model.eval()
    wanted = output(model, given)
    with pytest.warns(UserWarning, match="AttnProcessor2_0 attends without a backend"):
        host.set_attention_backend("polyattn")
    out = output(model, given)
    assert ((out - wanted).abs().max() / wanted.abs().max()) < 1e-5
    report = polyattn_diffusers.report()
    assert sum(report.served.values()) == 2
    assert list(report.fallbacks) == [
        "HunyuanVideoTransformer3DModel: AttnProcessor2_0 attends without a backend"
    ]


def tensors(queries: int = 6, keys: int = 9) -> list[Tensor]:
    return [torch.randn(2, n, 2, 16) for n in (queries, keys, keys)]


TEXT = torch.arange(9) < torch.tensor([4, 9])[:, None]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "text padding": {"attn_mask": TEXT},
    "additive": {"attn_mask": TEXT[:, None, None].float().log()},
    "over heads": {"attn_mask": TEXT[:, None, None].expand(2, 2, 6, 9)},
    "queries by keys": {"attn_mask": torch.ones(6, 9).tril(3).bool()},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.9},
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_call_gives_what_the_native_backend_gives(name: str) -> None:
    qkv = tensors()
    wanted = dispatch_attention_fn(*qkv, **CALLS[name])
    with attention_backend("polyattn"):
        found = dispatch_attention_fn(*qkv, **CALLS[name])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not polyattn_diffusers.report().fallbacks
    assert sum(polyattn_diffusers.report().served.values()) == 1


@torch.no_grad()
def test_the_lse() -> None:
    q, k, v = tensors()
    out, lse = attention(q, k, v, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q.double(), k.double()) / 4
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, dispatch_attention_fn(q, k, v), rtol=1e-5, atol=1e-5)


def test_what_falls_back_is_named() -> None:
    qkv = [t.requires_grad_() for t in tensors()]
    wanted = torch.autograd.grad(dispatch_attention_fn(*qkv).square().sum(), qkv)
    with attention_backend("polyattn"), pytest.warns(UserWarning, match="gradients are asked for"):
        found = torch.autograd.grad(dispatch_attention_fn(*qkv).square().sum(), qkv)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    holes = torch.tensor([True, False, True] * 3).expand(6, 9)
    with torch.no_grad(), pytest.warns(UserWarning, match="a mask with holes"):
        found_one = attention(*qkv, attn_mask=holes)
        assert torch.equal(found_one, dispatch_attention_fn(*qkv, attn_mask=holes))  # type: ignore[arg-type]
    with pytest.raises(PolyattnError, match="context parallelism"):
        attention(*qkv, _parallel_config=object())


@torch.no_grad()
def test_compiled_without_a_break() -> None:
    qkv = tensors()
    with attention_backend("polyattn"):
        compiled = torch.compile(
            lambda *t: dispatch_attention_fn(*t), fullgraph=True, backend="aot_eager"
        )
        found = compiled(*qkv)
    assert sum(polyattn_diffusers.report().served.values()) == 1
    torch.testing.assert_close(found, dispatch_attention_fn(*qkv), rtol=1e-5, atol=1e-5)


def test_the_name_is_a_member_like_the_others() -> None:
    member = AttentionBackendName("polyattn")
    assert member is polyattn_diffusers.POLYATTN is AttentionBackendName["polyattn"]
    assert isinstance(member, AttentionBackendName)
    assert member == member.value == member.name == "polyattn"
    assert member in list(AttentionBackendName)
    assert add_name("polyattn", attention) is member
    with pytest.raises(ValueError, match="not registered"), attention_backend("polyattn2"):
        pass
