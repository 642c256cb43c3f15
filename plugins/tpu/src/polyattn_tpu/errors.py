"""What a step that can't be planned or run raises."""

from __future__ import annotations


class PlanError(ValueError):
    """A step, a tensor or a bucket that doesn't fit; the text names it, its value and the remedy."""
