"""How are a step's queries and keys normed and rotated? Their weights and angles, and torch's form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rows (…, size) over the root of their mean square, times a weight (size,), in their dtype.

    Zhang and Sennrich, 2019; the weight is rounded to the rows' dtype first.
    """
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(rows.dtype)


@dataclass(frozen=True)
class Norms:
    """The RMS norm of a step's queries and keys, between their bias and their rotation.

    Attributes:
        query: (size,), the weight of each head, or (num_heads * size,) of all heads as one row:
            float32 (float64 in a float64 layer), contiguous.
        key: as `query`; None where keys come from the cache alone.
        eps: added to the mean square.
        over: `"head"` or `"token"`, as in `NormSpec`.

    Examples:
        >>> norms = Norms(torch.ones(2), torch.ones(2), 0.0, "head")
        >>> norms.applied(torch.tensor([[[3.0, 3.0]]]), norms.query)
        tensor([[[1., 1.]]])

    """

    query: Tensor
    key: Tensor | None
    eps: float
    over: str

    def applied(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return a normed copy, in float32 or more.

        Args:
            x: (num_tokens, heads, width).
            weight: `query` or `key`.

        """
        assert weight is not None
        x = x.to(weight.dtype)
        if self.over == "head":
            return rms_norm(x, weight, self.eps)
        return rms_norm(x.flatten(1), weight, self.eps).view_as(x)


@dataclass(frozen=True)
class Rotation:
    """The rotation of a step's tokens (Su et al., 2021).

    It is computed once, and every layer of the group applies it.

    Attributes:
        turns: (num_tokens, size), float32 (float64 in a float64 layer): the cosines of a token's size /
            2 angles, then their sines, all times the rope's attention factor.
        query_scale: (num_tokens,) of the same dtype, which multiplies the whole query; None for 1.
        pairing: pair i is elements i and i + size / 2 (`"neox"`), or 2 i and 2 i + 1 (`"gptj"`), of the
            rotated part. Its elements a and b become a cos - b sin and b cos + a sin.
        size: elements of the rotated part; 0: nothing is rotated.
        last: the part is the last elements of each head (an MLA layer's rope part), not the first.

    Examples:
        >>> quarter = torch.tensor([[0.0, 1.0]])  # cosine and sine of 90 degrees
        >>> Rotation(quarter, None, "neox", 2).applied(torch.tensor([[[1.0, 2.0]]]))
        tensor([[[-2.,  1.]]])

    """

    turns: Tensor
    query_scale: Tensor | None
    pairing: str
    size: int
    last: bool = False

    def offset(self, width: int) -> int:
        """Return the first rotated element of a head.

        Args:
            width: the head's size, in elements.

        """
        return width - self.size if self.last else 0

    def applied(self, x: Tensor) -> Tensor:
        """Return a rotated copy, in float32 or more.

        Args:
            x: (num_tokens, heads, width).

        """
        x = x.to(self.turns.dtype, copy=True)
        if not self.size:
            return x
        start = self.offset(x.shape[2])
        part = x[..., start : start + self.size]
        cos, sin = self.turns[:, None].chunk(2, dim=-1)
        if self.pairing == "neox":
            first, second = part.chunk(2, dim=-1)
        else:
            first, second = part[..., 0::2], part[..., 1::2]
        turned = first * cos - second * sin, second * cos + first * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
        return x

    def applied_to_query(self, query: Tensor) -> Tensor:
        """Return the query rotated and multiplied by its temperature, in float32 or more.

        Args:
            query: (num_tokens, heads, width).

        """
        query = self.applied(query)
        return query if self.query_scale is None else query * self.query_scale[:, None, None]

    def inverse(self) -> Rotation:
        """Return the rotation by the opposite angles, without the query's temperature."""
        pairs = self.size // 2
        turns = torch.cat([self.turns[:, :pairs], -self.turns[:, pairs:]], 1)
        return replace(self, turns=turns, query_scale=None)

    @cached_property
    def angles(self) -> Tensor:
        """float64 (num_tokens, size / 2): where a captured step's angles are computed, from its first
        replay on.
        """
        pairs = self.size // 2
        return self.turns.new_empty(self.turns.shape[0], pairs, dtype=torch.float64)

    def to(self, device: torch.device) -> Rotation:
        """Return the rotation on a device.

        Args:
            device: where the tensors go.

        """
        scale = None if self.query_scale is None else self.query_scale.to(device)
        return replace(self, turns=self.turns.to(device), query_scale=scale)

    def refilled(self, other: Rotation) -> Rotation:
        """Return this rotation with another step's angles, copied into the tensors that a graph reads.

        Args:
            other: the rotation of as many tokens.

        """
        self.turns.copy_(other.turns)
        if self.query_scale is not None and other.query_scale is not None:
            self.query_scale.copy_(other.query_scale)
        return self


@dataclass(frozen=True)
class NewTokens:
    """The tensors that a step brings, which may be strided as views of a fused QKV.

    Attributes:
        query: (num_tokens, num_heads, size).
        key: (num_tokens, num_kv_heads, size), or None.
        value: (num_tokens, num_kv_heads, v_size), or None.
        bias: (num_heads * size + num_kv_heads * size + num_kv_heads * v_size,), added first, in the
            order of query, key and value: float32 (float64 in a float64 layer); or None.
        norms: applied then, before queries and keys are rotated; or None.

    Examples:
        >>> NewTokens(torch.zeros(3, 4, 64), None, None).biases() is None
        True

    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    bias: Tensor | None = None
    norms: Norms | None = None

    def biases(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the bias of query, key and value, (heads, size) each; None where there is none."""
        if self.bias is None:
            return None
        assert self.key is not None and self.value is not None
        shapes = [tuple(t.shape[1:]) for t in (self.query, self.key, self.value)]
        parts = self.bias.split([heads * size for heads, size in shapes])
        query, key, value = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return query, key, value


def prepared(
    new: NewTokens, rotation: Rotation | None, of_keys: Rotation | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return a step's query, key and value biased, normed and rotated, by torch's operators.

    Args:
        new: the step's tensors, (num_tokens, heads, size) each; they stay as they are.
        rotation: the queries' rotation; None: nothing is rotated.
        of_keys: the keys' rotation, where it isn't the queries'.

    Returns:
        Query, key and value: computed in at least float32. A tensor that nothing is done to is returned
        as it is.

    Examples:
        >>> query, key, value = prepared(NewTokens(torch.ones(1, 1, 4), None, None), None)
        >>> query.shape, key
        (torch.Size([1, 1, 4]), None)

    """
    query, key, value = new.query, new.key, new.value
    biases = new.biases()
    if biases is not None:
        assert key is not None and value is not None
        query, key, value = query + biases[0], key + biases[1], value + biases[2]
    if (norms := new.norms) is not None:
        query = norms.applied(query, norms.query)
        key = None if key is None else norms.applied(key, norms.key)
    if rotation is not None:
        query = rotation.applied_to_query(query)
        key = None if key is None else (of_keys or rotation).applied(key)
    return query, key, value
