"""transformers with `attn_implementation="polyattn"` on the GPU, beside its own eager attention."""

from __future__ import annotations

import time
from typing import Any

import polyattn_transformers
import torch
from torch import Tensor

from engines import DEVICE

SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 64},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}
PADDED = (0, 40, 111)


def model_of(name: str, dtype: torch.dtype, routed: bool = True) -> Any:
    """Return a random model on the GPU, the same numbers in each dtype.

    Not `routed`: each token goes to all experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(sum(map(ord, name)))
    fields = {**SIZES, **MODELS[name]}
    if not routed and "num_local_experts" in fields:
        fields["num_experts_per_tok"] = fields["num_local_experts"]
    config = AutoConfig.for_model(name, **fields)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.04)
    return model.to(dtype)


def prompt(padded: bool, length: int = 200) -> dict[str, Tensor]:
    """Return three prompts, left padding where asked."""
    torch.manual_seed(1)
    ids = torch.randint(3, 8192, (len(PADDED), length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED if padded else ()):
        mask[row, :count], ids[row, :count] = 0, 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def served() -> None:
    """Raise where something fell back."""
    report = polyattn_transformers.report()
    assert report.served and not report.fallbacks, str(report)


def real_logits(model: Any, kind: str, given: dict[str, Tensor]) -> Tensor:
    """Return the logits of the tokens that are no padding (tokens, vocabulary)."""
    model.set_attn_implementation(kind)
    found: Tensor = model(**given).logits[given["attention_mask"].bool()]
    return found


def exact_logits(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return `real_logits` in float64, by eager attention, of each prompt without its padding.

    With it eager's float64 is NaN: a row that sees nothing but the least float64 has no softmax in
    float32, which eager takes it in.
    """
    model = model.double()
    model.set_attn_implementation("eager")
    rows = []
    for ids, kept in zip(given["input_ids"], given["attention_mask"].bool(), strict=True):
        positions = kept.nonzero().T
        rows.append(model(input_ids=ids[kept][None], position_ids=positions).logits[0])
    return torch.cat(rows)


@torch.no_grad()
def logits(name: str) -> dict[str, Any]:
    """float32 within 1e-5 of eager's; bf16 as near to float64 as eager's bf16.

    In bf16 each token goes to all experts: where a rounding sends it to another one, the error is that of
    another model, and the ratio is 0.6 to 1.35, by the seed.
    """
    found: dict[str, Any] = {}
    right = True
    for padded in (False, True):
        given = prompt(padded)
        model = model_of(name, torch.float32)
        eager, ours = (real_logits(model, kind, given) for kind in ("eager", "polyattn"))
        error = float((eager - ours).abs().max() / eager.abs().max())
        exact = exact_logits(model_of(name, torch.float32, routed=False), given)
        model = model_of(name, torch.bfloat16, routed=False)
        errors = []
        for kind in ("polyattn", "eager"):
            apart = real_logits(model, kind, given).double() - exact
            errors.append(float((apart.norm(dim=-1) / exact.norm(dim=-1)).median()))
        ratio = errors[0] / errors[1]
        which = "left padding" if padded else "no padding"
        found |= {f"float32, {which}": error, f"bf16 error over eager's, {which}": ratio}
        right &= error <= 1e-5 and ratio <= 1.1
        served()
    return found | {"right": right}


@torch.no_grad()
def tokens(name: str, mode: str) -> dict[str, Any]:
    """Greedy tokens in float32 equal eager's."""
    options = {
        "no padding": {}, "left padding": {}, "beams": {"num_beams": 3},
        "static cache": {"cache_implementation": "static", "disable_compile": True},
        "static cache, compiled": {"cache_implementation": "static"},
    }[mode]  # fmt: skip
    given = prompt(padded=mode != "no padding", length=120)
    model = model_of(name, torch.float32)
    new = 24

    def run(kind: str, **more: Any) -> list[list[int]]:
        model.set_attn_implementation(kind)
        found: Tensor = model.generate(**given, max_new_tokens=new, do_sample=False, **more)
        return found.tolist()  # type: ignore[no-any-return]

    expected = run("eager", **options | {"disable_compile": True})
    start = time.perf_counter()
    found = run("polyattn", **options)
    seconds = time.perf_counter() - start
    served()
    same = sum(a == b for a, b in zip(expected, found, strict=True))
    return {"equal": same, "of": len(expected), "seconds": seconds, "right": same == len(expected)}


@torch.no_grad()
def compiled(name: str) -> dict[str, Any]:
    """`torch.compile(fullgraph=True)` by Inductor gives the uncompiled model's logits."""
    given = prompt(padded=True)
    model = model_of(name, torch.float32)
    expected = real_logits(model, "eager", given)
    model.set_attn_implementation("polyattn")
    whole = torch.compile(model, fullgraph=True)(**given, use_cache=False).logits
    found = whole[given["attention_mask"].bool()]
    served()
    error = float((expected - found).abs().max() / expected.abs().max())
    return {"error": error, "right": error <= 1e-4}


def batching(name: str) -> dict[str, Any]:
    """Continuous batching, the cache read and written in place: tokens equal `generate`'s."""
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = model_of(name, torch.float32)
    torch.manual_seed(2)
    prompts = [torch.randint(3, 8192, (n,)).tolist() for n in (3, 137, 61, 300, 1, 90)]
    options = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        expected = [
            model.generate(torch.tensor([p], device=DEVICE), generation_config=options)[
                0, len(p) :
            ].tolist()
            for p in prompts
        ]
    manager = polyattn_transformers.continuous_batching_manager(
        model, options, continuous_batching_config=ContinuousBatchingConfig(
            page_size=64, num_blocks=128, max_batch_tokens=128, use_cuda_graph=False)
    )  # fmt: skip
    manager.start()
    found: dict[str, list[int]] = {}
    try:
        names = [manager.add_request(p, max_new_tokens=24) for p in prompts]
        end = time.monotonic() + 60
        while len(found) < len(prompts) and time.monotonic() < end:
            result = manager.get_result(timeout=20)
            if result is not None and result.is_finished():
                found[result.request_id] = result.generated_tokens
    finally:
        manager.stop(block=True)
    served()
    same = sum(found.get(n) == e for n, e in zip(names, expected, strict=True))
    return {"equal": same, "of": len(expected), "right": same == len(expected)}
