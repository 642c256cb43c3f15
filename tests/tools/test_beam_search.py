"""Beam search over shared blocks finds the tokens that transformers' own finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import here
from polyattn import LayerSpec, select_layers
from polyattn.errors import SettingsError
from polyattn.tools.replay.beam_search import BeamSearch
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.fields import Fields
from polyattn.tools.replay.model.step import GroupMemory
from polyattn.tools.replay.model.weights import Checkpoint, load
from polyattn.tools.replay.prompts import prompt_tokens
from polyattn.tools.replay.runners import Options
from polyattn.tools.replay.trace import Request
from whole_models import saved

BEAMS, TOKENS, SIZE = 3, 14, 4
PROMPTS = [[5, 9, 2, 7, 1, 3, 8, 6, 4, 11], [12, 3, 3], [7] * 8]


def memories_of(folder: Path, blocks: int = 96) -> tuple[Decoder, list[GroupMemory]]:
    specs = [
        s if s.kind.is_recurrent else s.replace(block_size=SIZE)
        for s in LayerSpec.from_hf_config(folder)
    ]
    model = Decoder(Fields(folder), specs)
    groups = select_layers(specs, "cpu")
    load(model, Checkpoint(folder), torch.device("cpu"))
    options = Options(layers=10**6)
    return model, [GroupMemory(group, options, blocks) for group in groups]


def by_transformers(
    model: Any, prompt: list[int], end: int | None, most: int = TOKENS
) -> tuple[list[Any], list[float]]:
    found = model.generate(
        torch.tensor([prompt]), num_beams=BEAMS, num_return_sequences=BEAMS, do_sample=False,
        max_new_tokens=most, eos_token_id=end, pad_token_id=0, return_dict_in_generate=True,
        output_scores=True, use_cache=True,
    )  # fmt: skip
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    if end is not None:
        rows = [row[: row.index(end) + 1] if end in row else row for row in rows]
    return rows, found.sequences_scores.tolist()


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ends", [False, True])
def test_tokens_are_those_of_transformers(name: str, ends: bool, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    ours, memories = memories_of(tmp_path)
    end = None
    if ends:  # a token that hypotheses meet on their way
        plain, _ = by_transformers(model, PROMPTS[0], None)
        end = plain[0][TOKENS // 2]
    search = BeamSearch(ours, memories, BEAMS, TOKENS, end=end, check_tokens=1)
    found = search.run(PROMPTS)
    for prompt, hypotheses in zip(PROMPTS, found, strict=True):
        tokens, scores = by_transformers(model, prompt, end)
        assert [list(one.tokens) for one in hypotheses] == tokens
        assert [one.score for one in hypotheses] == pytest.approx(scores, rel=1e-4)
    if ends:
        assert any(len(one.tokens) < TOKENS for hypotheses in found for one in hypotheses)
    assert search.widest == BEAMS * len(PROMPTS), "beams are rows of one decode"
    assert search.copied > 0, "a block that others hold is copied before it is written to"
    assert search.checker.checked > 0
    assert all(pool.num_used == 0 for pool in search.pools), "every block was given back"


def test_beams_share_the_contexts_blocks(tmp_path: Path) -> None:
    """A prompt of 40 tokens in blocks of 4, three beams of 14: 10 blocks are held once, not thrice."""
    saved("llama", tmp_path)
    most = 10 + BEAMS * (TOKENS // SIZE + 2)
    ours, memories = memories_of(tmp_path, blocks=most)
    search = BeamSearch(ours, memories, BEAMS, TOKENS)
    search.run([list(range(1, 41))])
    assert most < BEAMS * -(-(40 + TOKENS) // SIZE)


def test_run_searches_a_traces_prompts(tmp_path: Path) -> None:
    """`polyattn run --beams`: prompts of several lengths and outputs, some together, some after."""
    model, trace = saved("llama", tmp_path), tmp_path / "trace.jsonl"
    sizes = [(10, TOKENS), (3, 6), (21, 9), (8, TOKENS)]
    lines = [f'{{"input_length": {prompt}, "output_length": {out}}}' for prompt, out in sizes]
    trace.write_text("\n".join(lines))
    command = [
        "run", "--weights", str(tmp_path), "--trace", str(trace), "--beams", str(BEAMS),
        "--block-size", str(SIZE), "--cache-gb", "0.01", "--device", "cpu", "--token-budget", "30",
    ]  # fmt: skip
    code, said, _ = here(*command)
    assert code == 0 and "4 prompts, 3 beams each" in said and "prompt 3: " in said
    found = json.loads(here(*command, "--json")[1])
    assert found["widest_decode"] == 2 * BEAMS, "three prompts' tokens are more than a step has"
    assert found["blocks_copied"] > 0 and found["checked_tokens"] > 0 and found["max_error"] < 1e-3
    for index, (prompt, out) in enumerate(sizes):
        tokens = prompt_tokens(Request(prompt, out), index, model.config.vocab_size, 0)
        wanted, scores = by_transformers(model, tokens, None, out)
        assert [one["tokens"] for one in found["hypotheses"][index]] == wanted
        rated = [one["score"] for one in found["hypotheses"][index]]
        assert rated == pytest.approx(scores, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--beams=3 searches by a model's own tokens"),
        (["--weights", "random", "--samples", "2"], "--beams=3 and --samples=2 don't go together"),
        (["--weights", "random", "--arrivals", "trace"], "--beams=3 and --arrivals=trace don't go"),
        (["--weights", "random", "--max-seqs", "2"], "more rows than --max-seqs=2; raise it"),
        (["--weights", "random", "--token-budget", "9"], "request 0's prompt has 10 tokens"),
        (
            ["--weights", "random", "--cache-gb", "1e-5"],
            "3 beams need up to 14 blocks, and the cache",
        ),
    ],
)
def test_what_run_does_not_search_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 10, "output_length": 14}')
    command = [
        "run",
        str(tmp_path),
        "--trace",
        str(trace),
        "--device",
        "cpu",
        "--beams",
        str(BEAMS),
    ]
    code, _, text = here(*command, "--block-size", str(SIZE), "--cache-gb", "0.01", *options)
    assert code == 2 and said in " ".join(text.split())


def test_what_it_does_not_serve_is_refused(tmp_path: Path) -> None:
    saved("mamba2", tmp_path)
    ours, memories = memories_of(tmp_path)
    with pytest.raises(SettingsError, match="keeps a state; serve it without beams"):
        BeamSearch(ours, memories, BEAMS, TOKENS)
    with pytest.raises(SettingsError, match="beams=0 must be a positive integer"):
        BeamSearch(ours, [], 0, TOKENS)
