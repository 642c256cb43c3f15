"""What is no plain decoder: encoders, vision, encoder-decoders, packed rows, blocks, fallbacks."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import polyattn_transformers
import pytest
import torch
import transformers
from every_type import tiny_model
from packaging.version import Version
from polyattn import PolyattnError
from polyattn.selection import running
from polyattn_transformers.attention import attention as attend
from polyattn_transformers.masks import make_mask
from tiny_models import SIZES, decoder
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, PreTrainedModel

SMALL = SIZES | {"num_key_value_heads": 4}
BLOCKS = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip


@pytest.fixture(autouse=True)
def clean() -> None:
    polyattn_transformers.reset()


def build(kind: Any, name: str, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(name, **fields)
    config._attn_implementation = "eager"
    model: PreTrainedModel = kind.from_config(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    return model


def both(model: PreTrainedModel, run: Any) -> tuple[Any, Any]:
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation("polyattn")
    return expected, run(model)


def close(expected: torch.Tensor, found: torch.Tensor, limit: float = 1e-5) -> None:
    error = (expected - found).abs().max() / expected.abs().max()
    assert error <= limit, float(error)


def served() -> None:
    report = polyattn_transformers.report()
    assert report.served and not report.fallbacks, str(report)


ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "roberta": {"type_vocab_size": 2, "pad_token_id": 1},
    "modernbert": {"local_attention": 6, "global_attn_every_n_layers": 2},
    "xlm-roberta": {"type_vocab_size": 2, "pad_token_id": 1},
    "electra": {"embedding_size": 64},
}


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoders(name: str, side: str) -> None:
    model = build(AutoModel, name, **{**SMALL, **ENCODERS[name]})
    ids, mask = torch.randint(3, 96, (3, 23)), torch.ones(3, 23, dtype=torch.int64)
    for row, count in enumerate((0, 5, 12)):
        if side == "left":
            mask[row, :count] = 0
        elif side == "right":
            mask[row, 23 - count :] = 0
    expected, found = both(model, lambda m: m(ids, attention_mask=mask).last_hidden_state)
    close(expected[mask.bool()], found[mask.bool()])
    served()


@pytest.mark.parametrize("name", ["vit", "siglip_vision_model", "clip_vision_model", "dinov2"])
@torch.no_grad()
def test_vision_towers(name: str) -> None:
    fields = {k: v for k, v in SMALL.items() if "token" not in k and k != "head_dim"}
    model = build(AutoModel, name, **fields, image_size=32, patch_size=8)
    image = torch.randn(2, 3, 32, 32)
    expected, found = both(model, lambda m: m(pixel_values=image).last_hidden_state)
    close(expected, found)
    served()


@pytest.mark.parametrize("name", ["bart", "marian", "pegasus", "mbart"])
@torch.no_grad()
def test_encoder_decoders(name: str) -> None:
    model = build(AutoModelForSeq2SeqLM, name, **BLOCKS, vocab_size=96, pad_token_id=0,
                  decoder_start_token_id=2, eos_token_id=None, forced_eos_token_id=None)  # fmt: skip
    ids, mask = torch.randint(3, 96, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    for beams in (1, 3):
        expected, found = both(
            model,
            lambda m, n=beams: m.generate(
                ids, attention_mask=mask, max_new_tokens=8, num_beams=n, do_sample=False
            ),
        )
        assert expected.tolist() == found.tolist()
    served()


@torch.no_grad()
def test_packed_positions() -> None:
    """Several sequences in one row, told by positions that start again."""
    ids = torch.randint(3, 96, (1, 20))
    positions = torch.tensor([[*range(1), *range(7), *range(12)]])
    for name in ("llama", "mistral", "olmo3"):
        expected, found = both(
            decoder(name), lambda m: m(ids, position_ids=positions, use_cache=False).logits
        )
        close(expected, found)
    served()


@torch.no_grad()
def test_image_blocks_and_prefixes() -> None:
    """Masks that are causal but for blocks: each query still sees an interval."""
    ids = torch.randint(3, 96, (2, 16))
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    prefix, image = seen.clone(), seen.clone()
    prefix[:6, :6] = True
    image[4:9, 4:9] = True
    packed = seen.clone()
    packed[7:, :7] = False
    for mask in (prefix, image, packed):
        expected, found = both(
            decoder("llama"),
            lambda m, s=mask: m(ids, attention_mask=_additive(s[None, None])).logits,
        )
        close(expected, found)
    served()


def _additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@torch.no_grad()
def test_random_intervals() -> None:
    """Any interval for each query, whatever kernels it takes."""
    torch.manual_seed(5)
    model, ids = decoder("llama"), torch.randint(3, 96, (3, 24))
    for _ in range(25):
        low = torch.randint(0, 20, (3, 24, 1))
        if torch.rand(()) < 0.6:  # sorted, with runs that look like windows and sequences
            low = (low // 7 * 7).sort(1).values
        high = (low + torch.randint(1, 9, (3, 24, 1))).clamp(max=24)
        key = torch.arange(24)
        mask = ((key >= low) & (key < high))[:, None]
        expected, found = both(model, lambda m, s=mask: m(ids, attention_mask=_additive(s)).logits)
        close(expected, found)
    served()


@torch.no_grad()
def test_holes_fall_back() -> None:
    ids, mask = torch.randint(3, 96, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 3] = 0
    with pytest.warns(UserWarning, match="LlamaAttention: a mask with holes"):
        expected, found = both(decoder("llama"), lambda m: m(ids, attention_mask=mask).logits)
    close(expected[mask.bool()], found[mask.bool()])
    assert polyattn_transformers.report().fallbacks == {"LlamaAttention: a mask with holes": 2}


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="set_attn_implementation reaches T5's stacks since transformers 5.20",
)
@torch.no_grad()
def test_position_bias_falls_back() -> None:
    model = build(AutoModelForSeq2SeqLM, "t5", vocab_size=96, d_model=64, d_kv=16, d_ff=64,
                  num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    ids = torch.randint(3, 96, (2, 9))
    with pytest.warns(UserWarning, match="argument position_bias"):
        expected, found = both(model, lambda m: m(ids, decoder_input_ids=ids).logits)
    close(expected, found)


@torch.no_grad()
def test_weights_that_are_asked_for_fall_back() -> None:
    ids = torch.randint(3, 96, (2, 9))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        expected, found = both(
            decoder("llama"), lambda m: m(ids, output_attentions=True).attentions[0]
        )
    close(expected, found)


@torch.no_grad()
def test_unknown_arguments_are_refused() -> None:
    """A model may expect a kernel of its own to read them: eager attention doesn't say what they mean."""
    model, ids = decoder("llama"), torch.randint(3, 96, (2, 9))
    model.set_attn_implementation("polyattn")
    model(ids, block_indices=None, position_ids=torch.arange(9)[None])
    model.model(ids, logits_to_keep=1)  # GOT-OCR2 passes it on
    with pytest.raises(PolyattnError, match=r"LlamaAttention calls attention with block_indices="):
        model(ids, block_indices=torch.zeros(1))
    layer, heads = model.model.layers[0].self_attn, torch.randn(1, 4, 9, 16)
    with pytest.raises(
        PolyattnError, match=r"indices=(,.*since transformers 5.18| but without a mask)"
    ):
        attend(layer, heads, heads, heads, None, indices=torch.zeros(1, 9, 3, dtype=torch.int32))


@torch.no_grad()
def test_a_causal_mask_is_never_made_for_models_that_do_not_read_it() -> None:
    for name in ("llama", "gpt_oss", "gemma2"):
        config = decoder(name).config
        assert make_mask(1, 7, 7, config=config) is None
    config = tiny_model("splinter", AutoModel).config
    assert (
        make_mask(1, 7, 7, allow_is_bidirectional_skip=True, config=config).dtype == torch.float32
    )


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma2"])
def test_a_training_step_has_eagers_gradients(name: str) -> None:
    """By sdpa, but where a layer has what sdpa hasn't: sinks, a soft cap."""
    ids, mask = torch.randint(3, 96, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :4] = 0
    labels = ids.clone()
    labels[0, :5] = -100  # the first real token's is what the last padding says

    def step(model: PreTrainedModel) -> torch.Tensor:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        weights = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return torch.cat(weights)

    model = decoder(name)
    expected = step(model)
    model.set_attn_implementation("polyattn")
    own = "torch.nn.functional.scaled_dot_product_attention"
    with (
        pytest.warns(UserWarning, match="gradients are asked for"),
        mock.patch(own, wraps=torch.nn.functional.scaled_dot_product_attention) as sdpa,
    ):
        found = step(model)
    close(expected, found, 1e-4)
    assert bool(sdpa.call_count) == (name in ("llama", "mistral"))


def test_dropout_is_sdpas() -> None:
    model, ids = decoder("llama"), torch.randint(3, 96, (2, 12))
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    found = {}
    for implementation in ("sdpa", "polyattn"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found[implementation] = model(ids).logits
    close(found["sdpa"], found["polyattn"])
    assert polyattn_transformers.report().fallbacks == {"LlamaAttention: dropout; sdpa serves": 2}


@torch.no_grad()
def test_fullgraph_compile() -> None:
    ids, mask = torch.randint(3, 96, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    for name in ("llama", "gpt_oss"):
        model = decoder(name)
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("polyattn")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
        close(expected[mask.bool()], found[mask.bool()])
    served()


@torch.no_grad()
def test_polyattn_why_tells_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(running, "_written", {})
    model = decoder("llama")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 0.1234  # no other test's, so that the group is a new one
    both(model, lambda m: m(torch.randint(3, 96, (3, 11))))
    (process,) = running.running()
    assert "polyattn_transformers" in process.integrations
    assert [d["spec"]["scale"] for d in process.decisions] == [0.1234]
