"""Trainer, PEFT and TRL, where they are installed, train on polyattn as on sdpa: equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyattn_transformers
import pytest
import torch
from tiny_models import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

pytest.importorskip("accelerate")
peft, trl = pytest.importorskip("peft"), pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

OPTIONS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
    "report_to": [], "use_cpu": True, "learning_rate": 1e-2, "logging_steps": 1, "seed": 3,
    "disable_tqdm": True, "save_strategy": "no",
}  # fmt: skip


def rows() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 96, (16, 24), generator=draw).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(name: str, folder: Path, trainer: str, lora: bool, again: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=name).float()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))  # fmt: skip
    options = OPTIONS | {"output_dir": str(folder), "gradient_checkpointing": again}
    if trainer == "TRL":
        data = datasets.Dataset.from_list(rows())
        options |= {
            "bf16": False,
            "max_length": 24,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        run: Any = trl.SFTTrainer(
            model, trl.SFTConfig(**options), train_dataset=data, eval_dataset=data,
            processing_class=tokenizer(),
        )  # fmt: skip
    else:
        run = Trainer(
            model, TrainingArguments(**options), train_dataset=rows(), eval_dataset=rows()
        )  # type: ignore[arg-type]
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    weights = torch.cat([w.detach().flatten() for w in model.parameters() if w.requires_grad])
    return [*losses, run.evaluate()["eval_loss"]], weights


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"end": 0, "w": 1}, "end"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="end")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("again", [False, True], ids=["activations kept", "checkpointing"])
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("trainer", ["Trainer", "TRL"])
def test_losses_are_sdpas(trainer: str, lora: bool, again: bool, tmp_path: Path) -> None:
    expected, weights = trained("sdpa", tmp_path, trainer, lora, again)
    polyattn_transformers.reset()
    losses, ours = trained("polyattn", tmp_path, trainer, lora, again)
    assert len(expected) == 5 and losses[:4] == expected[:4] and torch.equal(ours, weights)
    assert losses[4] == pytest.approx(expected[4], rel=1e-5)  # the evaluation is polyattn's
    report = polyattn_transformers.report()
    assert report.served
    assert {*report.fallbacks} == {"LlamaAttention: gradients are asked for; sdpa serves"}
