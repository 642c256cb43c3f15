"""How are queries and keys normed? `Norms`: their weights, and torch's form."""

from __future__ import annotations

from dataclasses import dataclass

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
        key: alike; None where keys come from the cache alone.
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
