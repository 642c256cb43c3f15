"""`polyattn run --beams N`: each of a trace's prompts is searched with N beams, by a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyattn.errors import CacheError, SettingsError
from polyattn.selection.selection import SelectedLayers
from polyattn.tools.cli.output import console
from polyattn.tools.replay.beam_search import BeamSearch, Hypothesis
from polyattn.tools.replay.model.decoder import Decoder
from polyattn.tools.replay.model.runner import check_lengths
from polyattn.tools.replay.model.step import GroupMemory
from polyattn.tools.replay.prompts import prompt_tokens
from polyattn.tools.replay.runners import Options
from polyattn.tools.replay.trace import Request


def search(
    groups: Sequence[SelectedLayers],
    requests: Sequence[Request],
    options: Options,
    beams: int,
    model: Decoder,
) -> dict[str, Any]:
    """Search every request's prompt; returns what was found and what it took.

    Prompts are searched together as far as steps (`max_seqs` rows, `token_budget` tokens) and blocks
    have room. Raises `SettingsError`, and `CacheError` where one prompt has none.
    """
    check_lengths((group.spec for group in groups), requests)
    memories = [
        GroupMemory(g, options, n) for g, n in zip(groups, _blocks(groups, options), strict=True)
    ]
    beam_search = BeamSearch(
        model, memories, beams, max(r.output for r in requests), check_tokens=options.check_tokens
    )
    hypotheses: list[list[Hypothesis]] = []
    first = 0
    while first < len(requests):
        count = _together(requests[first:], first, beam_search, options)
        wave = requests[first : first + count]
        prompts = [
            prompt_tokens(request, first + i, model.vocabulary, options.seed)
            for i, request in enumerate(wave)
        ]
        hypotheses += beam_search.run(prompts, [request.output for request in wave])
        first += count
    return {
        "beams": beams,
        "requests": len(requests),
        "steps": beam_search.steps,
        "seconds": beam_search.seconds,
        "generated_tokens": sum(request.output for request in requests),
        "widest_decode": beam_search.widest,
        "most_blocks": beam_search.most_blocks,
        "blocks_copied": beam_search.copied,
        "checked_tokens": beam_search.checker.checked,
        "max_error": beam_search.checker.worst,
        "hypotheses": [
            [{"tokens": list(one.tokens), "score": one.score} for one in each]
            for each in hypotheses
        ],
    }


def print_search(report: dict[str, Any]) -> None:
    """Print each prompt's best hypothesis and what the search took."""
    console.print()
    for index, (best, *_) in enumerate(report["hypotheses"]):
        tokens = best["tokens"]
        shown = " ".join(map(str, tokens[:12])) + (" …" if len(tokens) > 12 else "")
        console.print(f"prompt {index}: {best['score']:.4f}  {shown}", highlight=False)
    console.print(
        f"{report['requests']} prompts, {report['beams']} beams each, in {report['steps']} steps of up "
        f"to {report['widest_decode']} rows and {report['seconds']:.2f} s: "
        f"{report['blocks_copied']} blocks copied before they were written to, "
        f"{', '.join(map(str, report['most_blocks']))} held at most",
        highlight=False,
    )
    console.print(
        f"{report['checked_tokens']} tokens checked against the float64 reference, largest relative "
        f"error {report['max_error']:.2g}",
        highlight=False,
    )


def _blocks(groups: Sequence[SelectedLayers], options: Options) -> list[int]:
    """Return each group's blocks: all hold as many tokens. Raises `CacheError`, `SettingsError`."""
    widths, sizes = [], []
    for group in groups:
        form = group.selection.cache_format
        if form is None:
            raise SettingsError(
                f"--beams: beams share blocks of keys, and {group.spec} keeps none; serve it without"
            )
        widths.append(form.bytes_per_token * len(group.layers))
        sizes.append(form.block_size)
    tokens = options.cache_bytes // sum(widths)
    if tokens < max(sizes):
        raise CacheError(
            f"--cache-gb={options.cache_bytes / 2**30:g} holds {tokens} tokens at {sum(widths)} bytes "
            f"each, not one block of {max(sizes)}; raise it"
        )
    return [tokens // size for size in sizes]


def _together(requests: Sequence[Request], index: int, search: BeamSearch, options: Options) -> int:
    """Return how many of the first requests are searched at once. Raises where not even one is."""
    rows = tokens = count = 0
    needed = [0] * len(search.pools)
    for request in requests:
        rows, tokens = rows + search.beams, tokens + request.prompt
        needed = [
            held + search.most_held(i, request.prompt, request.output)
            for i, held in enumerate(needed)
        ]
        if rows > options.max_seqs or tokens > options.token_budget:
            break
        if any(n > pool.num_blocks for n, pool in zip(needed, search.pools, strict=True)):
            break
        count += 1
    if count:
        return count
    if rows > options.max_seqs:
        raise SettingsError(
            f"--beams={search.beams} are more rows than --max-seqs={options.max_seqs}; raise it"
        )
    if tokens > options.token_budget:
        raise SettingsError(
            f"request {index}'s prompt has {tokens} tokens, and a search takes it in one step of "
            f"--token-budget={options.token_budget} at most; raise that, or lower --scale"
        )
    raise CacheError(
        f"request {index}: {search.beams} beams need up to {max(needed)} blocks, and the cache holds "
        f"{min(pool.num_blocks for pool in search.pools)}; raise --cache-gb, or lower --max-tokens"
    )
