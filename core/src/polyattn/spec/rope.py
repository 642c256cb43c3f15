"""How are queries and keys rotated? `RopeSpec` has everything that the rotation depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import SpecError, choice, finite, shown
from polyattn.spec.fields import Named, as_fields, from_fields, short_repr

PAIRINGS = ("neox", "gptj")
SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
POSITIONS = ("absolute", "cache")


@dataclass(frozen=True, kw_only=True)
class RopeSpec(Named):
    """A rotary position embedding (Su et al., 2021): frozen, hashable, no tensors.

    Sizes are in elements, lengths in tokens.

    Attributes:
        pairing: elements i and i + rotary_size / 2 are a pair (`"neox"`), or 2 i and 2 i + 1
            (`"gptj"`).
        rotary_size: the first elements of each head that are rotated; in an MLA layer, of its rope
            part. 0: none, for a layer whose queries alone are multiplied.
        base: theta: pair i rotates by position * base ** (-2 i / rotary_size).
        scaling: how the context is stretched: `"none"`, `"linear"`, `"dynamic"` (NTK), `"llama3"`,
            `"yarn"` (Peng et al., 2023), `"longrope"` (Ding et al., 2024) or `"proportional"`.
        factor: of `"linear"`, `"dynamic"` and the others' interpolation.
        original_length: the longest sequence that the model was trained on before.
        attention_factor: multiplies the rotated queries and the rotated keys, each.
        low_freq_factor: of `"llama3"`.
        high_freq_factor: of `"llama3"`.
        beta_fast: of `"yarn"`, in rotations over the original length.
        beta_slow: of `"yarn"`, as `beta_fast`.
        truncate: of `"yarn"`: round the bounds of its ramp to whole pairs.
        short_factors: of `"longrope"`, one for each pair, for up to `original_length` tokens.
        long_factors: of `"longrope"`, one for each pair, for more tokens.
        exponent_size: of `"proportional"`: pairs count over so many elements, of which `rotary_size`
            rotate.
        sections: pairs for each axis of a position (time, height, width: Qwen-VL). Text has the same
            position in every axis.
        sections_interleaved: pairs take axes in turn.
        positions: `"absolute"`, or `"cache"`: a key's place within the cache (StreamingLLM).
        last: the last elements of each head are rotated, not the first (DeepSeek-V4).
        clockwise: pairs turn by minus the angle (NanoChat).
        temperature: the query at position p is multiplied by 1 + temperature * ln(1 + floor((p +
            offset) / length)) (Llama 4).
        temperature_length: the `length` of that formula.
        temperature_offset: its `offset`.
        temperature_power: the query is multiplied by (1 + (p + offset) / length) ** power, too (Beam).
        learned: weights of the model scale each pair's angle, and each head's query by position (Mistral
            Large 4): the model rotates, and a layer takes `rotate=False`.

    Raises:
        SpecError: a value or a combination describes no rotation.

    Examples:
        >>> rope = RopeSpec(rotary_size=128, base=500000.0)
        >>> LayerSpec(num_heads=32, head_size=128, rope=rope).rope.pairing
        'neox'

    """

    pairing: str = "neox"
    rotary_size: int
    base: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_length: int | None = None
    attention_factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    exponent_size: int | None = None
    sections: tuple[int, ...] | None = None
    sections_interleaved: bool = False
    positions: str = "absolute"
    last: bool = False
    clockwise: bool = False
    temperature: float = 0.0
    temperature_length: int | None = None
    temperature_offset: int = 0
    temperature_power: float = 0.0
    learned: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors", "sections"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            if not isinstance(getattr(self, name), (tuple, type(None))):
                raise SpecError(
                    f"rope.{name}={shown(getattr(self, name))} must be a list of numbers"
                )
        _check_choices(self)
        _check_numbers(self)
        _check_scaling(self)

    @property
    def span(self) -> int:
        """Elements of a head among which the pairs lie: `rotary_size`, or all that are paired."""
        if self.scaling == "proportional" and self.exponent_size is not None:
            return self.exponent_size
        return self.rotary_size

    @property
    def by_length(self) -> bool:
        """Whether a token is turned by its sequence's length too."""
        return self.scaling in ("dynamic", "longrope")

    def check_span(self, name: str, part: int, whole: bool = False) -> None:
        """Check that a part of a head holds the rotated elements.

        Args:
            name: the part's field, for errors.
            part: its size, in elements.
            whole: whether all of it rotates, or none.

        Raises:
            SpecError: the part is smaller than the rotation.

        """
        if self.span > part or (whole and self.span not in (0, part)):
            raise SpecError(
                f"rope.rotary_size={self.rotary_size} rotates {self.span} elements; with {name}={part} "
                f"it must rotate {f'0 or {part}' if whole else f'{part} at most'}"
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RopeSpec:
        """Return a rope from its fields.

        Args:
            values: fields by name.

        Raises:
            SpecError: a field is unknown or its value isn't valid.

        """
        return from_fields("RopeSpec", cls, values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values."""
        return as_fields(self, {})


def _check_choices(rope: RopeSpec) -> None:
    for name, valid in (("pairing", PAIRINGS), ("scaling", SCALINGS), ("positions", POSITIONS)):
        choice(f"rope.{name}", getattr(rope, name), valid)
    for name in ("truncate", "sections_interleaved", "last", "clockwise", "learned"):
        if not isinstance(getattr(rope, name), bool):
            raise SpecError(f"rope.{name}={getattr(rope, name)!r} must be true or false")


def _check_numbers(rope: RopeSpec) -> None:
    size = rope.rotary_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or size % 2:
        raise SpecError(f"rope.rotary_size={size!r} must be an even number of elements, 0 for none")
    for name in ("base", "factor", "attention_factor"):
        _positive(name, getattr(rope, name))
    for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        if getattr(rope, name) is not None:
            _positive(name, getattr(rope, name))
    for name in ("original_length", "temperature_length", "exponent_size"):
        value = getattr(rope, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise SpecError(f"rope.{name}={value!r} must be a positive integer or None")
        if value is not None:
            _positive(name, value)
    pairs = (rope.exponent_size or size) // 2
    for name in ("short_factors", "long_factors"):
        factors = getattr(rope, name)
        if factors is not None and len(factors) != pairs:
            raise SpecError(f"rope.{name} has {len(factors)} entries for {pairs} rotated pairs")
        for factor in factors or ():
            _positive(name, factor)
    for name in ("temperature", "temperature_offset", "temperature_power"):
        value, kinds = getattr(rope, name), int if name == "temperature_offset" else (int, float)
        if not isinstance(value, kinds) or not finite(value):
            raise SpecError(f"rope.{name}={shown(value)} must be a number")
    for part in rope.sections or ():
        if not isinstance(part, int) or isinstance(part, bool) or part < 0:
            raise SpecError(f"rope.sections={shown(rope.sections)} must be numbers of pairs")
    if rope.sections is not None and sum(rope.sections) != pairs:
        raise SpecError(f"rope.sections={rope.sections} must sum to the {pairs} rotated pairs")


def _positive(name: str, value: Any) -> None:
    if not finite(value) or value <= 0:
        raise SpecError(f"rope.{name}={shown(value)} must be a positive number")


NEEDS = {
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_length", "beta_fast", "beta_slow"),
    "longrope": ("original_length", "short_factors", "long_factors"),
    "proportional": ("exponent_size",),
}
"""What each scaling can't do without."""


def _check_scaling(rope: RopeSpec) -> None:
    for name in NEEDS.get(rope.scaling, ()):
        if getattr(rope, name) is None:
            raise SpecError(f"rope.scaling={rope.scaling!r} needs rope.{name}")
    if rope.span % 2 or rope.span < rope.rotary_size:
        raise SpecError(
            f"rope.exponent_size={rope.exponent_size} must be even, and no less than "
            f"rotary_size={rope.rotary_size}"
        )
    if rope.scaling == "dynamic" and rope.rotary_size == 2:
        raise SpecError(
            "rope.scaling='dynamic' needs rotary_size above 2: its exponent is undefined there"
        )
    if rope.last and (rope.positions == "cache" or rope.scaling == "proportional"):
        raise SpecError(
            f"rope.last=True doesn't go with positions={rope.positions!r}, scaling={rope.scaling!r}; "
            "rotate keys before they are stored, by pairs of neighbours in the rotated part"
        )
    for name in ("clockwise", "learned", "temperature_power"):
        if getattr(rope, name) and rope.positions == "cache":
            raise SpecError(
                f"rope.{name}={getattr(rope, name)} doesn't go with positions='cache'; rotate keys "
                "before they are stored"
            )
    for name in ("temperature", "temperature_power"):
        if getattr(rope, name) and rope.temperature_length is None:
            raise SpecError(f"rope.{name}={getattr(rope, name)} needs rope.temperature_length")
