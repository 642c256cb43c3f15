"""T5's attention beside transformers' own module: an encoder's, a decoder's prefill and decode."""

from __future__ import annotations

import pytest
import torch
from polyattn import Attention, Batch, LayerGroup, LayerSpec, select, t5_buckets
from polyattn_models import model_layers
from torch import Tensor, nn

t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
CONFIG = {
    "model_type": "t5", "d_model": 48, "d_kv": 16, "num_heads": 3, "num_layers": 1, "d_ff": 8,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dtype": "float32",
}  # fmt: skip
TOKENS = 37


@pytest.mark.parametrize("buckets", [8, 32])
@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_t5_s(buckets: int, both_ways: bool) -> None:
    for reach in (20, 128):
        distance = torch.arange(-reach, reach + 1)
        theirs = t5.T5Attention._relative_position_bucket(distance, both_ways, buckets, reach)
        assert torch.equal(t5_buckets(buckets, reach, bidirectional=both_ways).long(), theirs)


def attention_of(decoder: bool) -> tuple[nn.Module, LayerSpec, Tensor]:
    """Return transformers' module without its last projection, our spec, and hidden states."""
    torch.manual_seed(0)
    config = t5.T5Config(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    config.is_decoder, config._attn_implementation = decoder, "eager"
    module = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    module.o = nn.Identity()
    tower = model_layers(CONFIG).tower("decoder" if decoder else "encoder")
    return module, tower[0].specs[0], torch.randn(TOKENS, 48)


def projected(module: nn.Module, hidden: Tensor) -> list[Tensor]:
    return [p(hidden).view(len(hidden), 3, 16) for p in (module.q, module.k, module.v)]


def inputs(module: nn.Module, decoder: bool) -> dict[str, Tensor]:
    return {
        "bias": module.relative_attention_bias.weight,
        "bucket_of_distance": t5_buckets(8, 20, bidirectional=not decoder),
    }


@torch.no_grad()
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA"])
def test_an_encoder_s(backend: str) -> None:
    module, spec, hidden = attention_of(decoder=False)
    expected = module(hidden[None])[0][0]
    layer = Attention(select(spec, backend=backend), inputs=inputs(module, False))
    out = layer(*projected(module, hidden), None, Batch.from_lens([TOKENS], [TOKENS]))
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["TORCH_SDPA", "VANILLA"])
def test_a_decoder_s_prefill_and_decode(backend: str) -> None:
    module, spec, hidden = attention_of(decoder=True)
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected = module(hidden[None], mask=mask)[0][0]
    group = LayerGroup(select(spec.replace(block_size=16), backend=backend))
    layer, cache = Attention(group, inputs=inputs(module, True)), group.allocate_cache(3)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    query, key, value = projected(module, hidden)
    for first, last in ((0, 30), (30, 34), *((n, n + 1) for n in range(34, TOKENS))):
        batch = Batch.from_lens([last - first], [last], table, 16)
        out = layer(query[first:last], key[first:last], value[first:last], cache, batch)
        torch.testing.assert_close(
            out.flatten(1), expected[first:last], rtol=1e-5, atol=1e-5
        )  # fmt: skip
