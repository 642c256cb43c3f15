"""How is a step rotated? By the formulas' angles at its positions, once for a group's layers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError, shown
from polyattn.families.attention.rope import axes, inv_freq, query_temperature
from polyattn.runtime.rotation import Rotation
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_positions
from polyattn.runtime.step.chosen_pages import positions_of
from polyattn.spec.layer import LayerSpec
from polyattn.spec.rope import RopeSpec

OWN_DOUBLES = ("cpu", "cuda")
"""Torch devices that compute in float64; elsewhere the angles are the host's."""


def check_rotate(spec: LayerSpec, rotate: bool | None) -> bool:
    """Return whether a layer rotates its inputs. Raises `SpecError` if the caller didn't say."""
    rope = spec.rope
    if rotate is not None and not isinstance(rotate, bool):
        raise SpecError(
            f"rotate={shown(rotate)} must be True, False, or None where the spec has no rope"
        )
    if rope is None:
        if rotate:
            raise SpecError(f"rotate=True, and the spec has no rope; select with one ({spec})")
        return False
    if rotate is None:
        raise SpecError(
            f"the spec has a rotary embedding (scaling {rope.scaling}, {rope.rotary_size} "
            f"elements): pass rotate=True if the layer must rotate queries and keys, or "
            f"rotate=False if they are rotated already; spec.replace(rope=None) is the layer without one"
        )
    if rope.learned and rotate:
        raise SpecError(
            "rotate=True with rope.learned=True: weights of the model are a part of its rotation; rotate "
            "queries and keys before, and pass rotate=False"
        )
    if rope.positions == "cache" and not rotate:
        raise SpecError(
            "rotate=False with rope.positions='cache': keys that move within the cache are kept "
            "unrotated; pass rotate=True and unrotated queries and keys"
        )
    return rotate


def rotated_here(spec: LayerSpec, rotate: bool) -> bool:
    """Return whether a rotating layer rotates before attention; kernels do in-cache positions."""
    return rotate and spec.rope is not None and spec.rope.positions == "absolute"


def rotation_of(spec: LayerSpec, batch: Batch, reuse: Rotation | None = None) -> Rotation | None:
    """Return how a batch's tokens rotate; None if nothing rotates before attention, or none is known.

    Dynamic NTK and LongRoPE go by each sequence's own length, so that no request's result depends on
    another. With `length_bounds` the host knows neither lengths nor missing positions, so `Store`
    refuses a layer that rotates. `reuse`: the rotation that a captured graph reads, into whose tensors
    it goes. Raises `BatchError`.
    """
    rope = spec.rope
    if rope is None or rope.positions == "cache":
        return None
    if spec.length_bounds and (batch.positions is None or rope.by_length):
        return None
    check_positions(batch, 1 if rope.sections is None else len(rope.sections))
    positions = positions_of(batch)
    if batch.device.type in OWN_DOUBLES:
        return _at(spec, positions, batch.query_lens, batch.text_lens, reuse)
    rotation = _at(spec, positions.cpu(), batch.query_lens, batch.text_lens).to(batch.device)
    return rotation if reuse is None else reuse.refilled(rotation)


def key_rotation_of(spec: LayerSpec, batch: Batch) -> Rotation | None:
    """Return the rotation of keys that are passed whole: row i stands i after its sequence's first.

    Positions that were given are the queries', and the keys' where each query has one key.
    """
    rope = spec.rope
    if rope is None:
        return None
    if batch.query_lens == batch.lens and batch.keys_packed:
        return rotation_of(spec, batch)
    if batch.positions is not None:
        raise BatchError(
            "positions were given for a layer that is not cached and whose keys aren't its queries' "
            "tokens; rotate the keys before, and pass rotate=False"
        )
    reach = max((a + n for a, n in zip(batch.key_starts, batch.lens, strict=True)), default=0)
    positions = np.zeros(reach, np.int64)
    counts = [0] * reach  # what lies between the sequences turns by nothing
    for start, length, whole in zip(batch.key_starts, batch.lens, batch.text_lens, strict=True):
        positions[start : start + length] = np.arange(whole - length, whole)
        counts[start : start + length] = [whole] * length
    at = torch.from_numpy(positions)
    at = at.to(batch.device) if batch.device.type in OWN_DOUBLES else at
    return replace(_at(spec, at, [1] * reach, counts).to(batch.device), query_scale=None)


def rotation_at(spec: LayerSpec, positions: Tensor, length: int) -> Rotation:
    """Return the rotation of one sequence's tokens.

    Args:
        spec: the layer, with a `rope`.
        positions: int64 (num_tokens,), each token's position.
        length: tokens of the sequence; some scalings depend on it.

    Returns:
        The rotation, on the positions' device.

    Examples:
        >>> rope = RopeSpec(rotary_size=64)
        >>> spec = LayerSpec(num_heads=1, head_size=64, rope=rope)
        >>> rotation_at(spec, torch.arange(3), 3).turns.shape
        torch.Size([3, 64])

    """
    return _at(spec, positions, [len(positions)], [length])


def _at(
    spec: LayerSpec,
    positions: Tensor,
    counts: list[int],
    lens: list[int],
    into: Rotation | None = None,
) -> Rotation:
    """Return the rotation at positions (num_tokens,) or (axes, num_tokens), float64 or int64.

    `counts` says how many of the tokens are each sequence's, `lens` how long the sequences are. `into`:
    whose tensors it is computed in, so that a captured step's replay allocates nothing.
    """
    rope = spec.rope
    assert rope is not None
    dtype = torch.float64 if spec.dtype == "float64" else torch.float32
    frequencies = _frequencies(rope, counts, lens, positions.device)
    along = positions[:, None]
    if positions.dim() > 1:
        along = positions[_axes(rope, positions.device)].T
    turn = torch.mul(along, frequencies, out=None if into is None else into.angles)
    pairs = turn.shape[1]
    if into is None:
        turns = torch.empty(turn.shape[0], 2 * pairs, dtype=dtype, device=positions.device)
    else:
        turns = into.turns
    torch.cos(turn, out=turns[:, :pairs])
    torch.sin(turn, out=turns[:, pairs:])
    if rope.attention_factor != 1.0:
        turns *= rope.attention_factor
    scale = None
    if rope.temperature or rope.temperature_power:
        first = positions if positions.dim() == 1 else positions[0]
        scale = query_temperature(rope, first).to(dtype)
    rotation = Rotation(
        turns, scale, rope.pairing, 2 * pairs, last=spec.latent is not None or rope.last
    )
    return rotation if into is None else into.refilled(rotation)


def _frequencies(
    rope: RopeSpec, counts: list[int], lens: list[int], device: torch.device
) -> Tensor:
    """Return the angle per position of each pair, (pairs,), or (num_tokens, pairs) by length."""
    if not rope.by_length:
        return _on(rope, 0, device)
    assert rope.original_length is not None
    # A length that changes nothing stands for all like it; LongRoPE has two kinds alone.
    kinds = [0 if n <= rope.original_length else n for n in lens]
    if rope.scaling == "longrope":
        kinds = [kind and rope.original_length + 1 for kind in kinds]
    distinct = sorted(set(kinds)) or [0]
    if len(distinct) == 1:
        return _on(rope, distinct[0], device)
    rows = torch.stack([inv_freq(rope, length) for length in distinct])
    places = {length: row for row, length in enumerate(distinct)}
    row_of = np.repeat(np.asarray([places[kind] for kind in kinds], np.int64), counts)
    return rows.to(device)[torch.from_numpy(row_of).to(device)]


@lru_cache(maxsize=256)
def _on(rope: RopeSpec, length: int, device: torch.device) -> Tensor:
    return inv_freq(rope, length).to(device)


@lru_cache(maxsize=64)
def _axes(rope: RopeSpec, device: torch.device) -> Tensor:
    return axes(rope).to(device)
