"""Serve a small model with transformers' continuous batching, its attention by polyattn.

    python examples/transformers_batching.py [a model's name or folder]

Without a name a tiny random Llama is made, so that nothing is downloaded; its tokens mean nothing.
"""

from __future__ import annotations

import sys

import polyattn_transformers
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig


def load(name: str | None) -> PreTrainedModel:
    """Return the model of this name, or a tiny random one."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name).eval()  # type: ignore[no-any-return]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-any-return]


def main(name: str | None = None) -> None:
    """Generate for six prompts of different lengths at once."""
    model = load(name)
    prompts = [torch.randint(3, 512, (n,)).tolist() for n in (4, 31, 12, 50, 7, 1)]
    manager = polyattn_transformers.continuous_batching_manager(
        model,
        GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
    )
    manager.start()
    try:
        waiting = {manager.add_request(prompt) for prompt in prompts}
        while waiting:
            result = manager.get_result(timeout=60)
            if result is None:
                raise TimeoutError(f"{len(waiting)} requests are unanswered after a minute")
            if result.is_finished():
                waiting.discard(result.request_id)
                print(result.request_id, result.generated_tokens)
    finally:
        manager.stop(block=True)
    print(polyattn_transformers.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
