"""Every model type of transformers, tiny: is `polyattn` what the model's own attention is?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polyattn_transformers
import torch
from polyattn import PolyattnError
from tiny import build, inputs_of, tiny_config
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

TOKENS = 23
"""More than every tiny window and `index_topk`."""
PADDING = [0, 5, 9]
LIMIT = 1e-4


def seed(number: int) -> None:
    """Seed torch's generator on the CPU alone.

    `torch.manual_seed` writes down the stack for each kind of device that isn't in use: a millisecond.
    """
    torch.default_generator.manual_seed(number)


def tiny_model(model_type: str, auto: Any) -> Any:
    """Return a type's tiny model, with weights that are large enough that what attention does shows.

    Raises what transformers raises where it can't be built.
    """
    model = build(tiny_config(model_type), [auto]).float()
    seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1)
            elif "sink" in name or "gate" in name:
                weight.normal_()
    return model


def prompts(padded: bool) -> dict[str, Tensor]:
    seed(2)
    ids = torch.randint(3, 60, (len(PADDING), TOKENS))
    mask = torch.ones_like(ids)
    if padded:
        for row, count in enumerate(PADDING):
            mask[row, :count], ids[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any) -> list[Tensor]:
    return [model(**prompts(False)).logits]


def left_padding(model: Any) -> list[Tensor]:
    inputs = prompts(True)
    return [model(**inputs).logits[inputs["attention_mask"].bool()]]


def greedy(model: Any, **options: Any) -> list[Tensor]:
    out = model.generate(
        **prompts(True), max_new_tokens=4, do_sample=False, disable_compile=True,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return [out.sequences.float(), *out.logits]


def beams(model: Any) -> list[Tensor]:
    return greedy(model, num_beams=3)


def static_cache(model: Any) -> list[Tensor]:
    # transformers 5.10 can't take up one of which a layer is unused.
    vars(model).pop("_cache", None)
    return greedy(model, cache_implementation="static")


def packed_positions(model: Any) -> list[Tensor]:
    positions = torch.tensor([[*range(4), *range(7), *range(12)]])
    ids = prompts(False)["input_ids"][:1]
    return [model(ids, position_ids=positions, use_cache=False).logits]


def two_chunks(model: Any) -> list[Tensor]:
    inputs = prompts(True)
    cut, cache = 9, DynamicCache(config=model.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = []
    for part in (slice(0, cut), slice(cut, TOKENS)):
        out = model(ids[:, part], attention_mask=mask[:, : part.stop], position_ids=places[:, part],
                    past_key_values=cache, use_cache=True)  # fmt: skip
        found.append(out.logits[mask[:, part].bool()])
    return found


def weights(model: Any) -> list[Tensor]:
    out = model(**prompts(False), output_attentions=True)
    return [out.logits, *(t for t in out.attentions or () if t is not None)]


def tensors(value: Any) -> Iterator[Tensor]:
    """Return the floating tensors of a model's output, in order; caches are left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def forward(model: Any) -> list[Tensor]:
    seed(3)
    return list(tensors(model(**inputs_of(model, model.config))))


def padded_forward(model: Any) -> list[Tensor]:
    seed(3)
    inputs = inputs_of(model, model.config)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][:, -6:] = 0
    out = model(**inputs)
    first = next(tensors(out))
    if first.shape[:2] == inputs["input_ids"].shape:
        first = first[:, :-6]
    return [first]


def all_weights(model: Any) -> list[Tensor]:
    seed(3)
    return list(tensors(model(**inputs_of(model, model.config), output_attentions=True)))


Case = Callable[[Any], list[Tensor]]
CASES: dict[Any, list[Case]] = {
    AutoModelForCausalLM: [
        logits, left_padding, greedy, static_cache, packed_positions, two_chunks, weights,
    ],
    AutoModel: [forward, padded_forward, all_weights],
}  # fmt: skip
"""What is compared of a type's model, by the automatic class that builds it."""
SDPA = {"hrm_text", "recurrent_gemma"}
"""Types without eager attention, or whose recurrent layers mix in the free outputs of padding."""


def verdict(model: Any, case: Case, limit: float = LIMIT) -> str:
    """Return what came of a case, "equal: served, fell back" or "REASON: what"."""
    oracle = "sdpa" if model.config.model_type in SDPA else "eager"
    if oracle == "sdpa" and case in (weights, all_weights):
        return "not run: sdpa has no weights"
    model.set_attn_implementation(oracle)
    try:
        expected = _run(model, case)
    except Exception as error:
        return f"not run: {type(error).__name__}: {error}"
    polyattn_transformers.reset()
    try:
        model.set_attn_implementation("polyattn")
        seen = _run(model, case)
    except PolyattnError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"crash: {type(error).__name__}: {error}"
    report = polyattn_transformers.report()
    return (
        difference(expected, seen, limit)
        or f"equal: {sum(report.served.values())}, {sum(report.fallbacks.values())}"
    )


def _run(model: Any, case: Case) -> list[Tensor]:
    seed(4)
    with torch.no_grad():
        return case(model)


def difference(expected: list[Tensor], seen: list[Tensor], limit: float) -> str:
    """Return what differs between two lists of tensors; nothing where they are equal."""
    shapes = [[tuple(t.shape) for t in each] for each in (expected, seen)]
    if shapes[0] != shapes[1]:
        return f"WRONG: shapes {shapes[1]} for {shapes[0]}"
    for a, b in zip(expected, seen, strict=True):
        if not torch.equal(a.isfinite(), b.isfinite()):
            return "WRONG: not finite"
        a, b = a[a.isfinite()], b[b.isfinite()]
        if a.numel() and (a - b).abs().max() > limit * a.abs().max().clamp(min=1e-6):
            return f"WRONG: {float((a - b).abs().max() / a.abs().max()):.2g}"
    return ""
