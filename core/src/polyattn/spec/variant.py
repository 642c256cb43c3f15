"""Which attention is it? `AttentionVariant`: pointwise functions of scores under a name for specs.

The functions are FlexAttention's (Dong et al., 2024): `score_mod(score, b, h, q_idx, kv_idx)` and
`mask_mod(b, h, q_idx, kv_idx)`, in plain torch operators. As in FlashInfer's attention variants (Ye et
al., 2025, section 3.2.3), they may read further inputs by name, and the softmax may be left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyattn.errors import SpecError, describe, nearest, shown

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
INPUT_DTYPES = ("float32", "int32", "int64", "bool")
SIZES = ("num_heads", "num_kv_heads", "num_seqs", "*")
"""What an input's dimension may be, beside a number; `*` is any."""
TRANSFORMS = ("query_mod", "key_mod", "value_mod", "output_mod")
"""Functions of elements that a variant may have, beside those of scores."""
FUNCTIONS = ("score_mod", "mask_mod", *TRANSFORMS, "feature_mod")
LANGUAGES = ("triton", "cuda", "jax")
"""What functions of scores are generated in, and may be written in by hand."""
MASKS = ("custom", "block_sparse")
"""Masks that a step brings: packed booleans, or rows of blocks."""
_INPUT = re.compile(r"(?P<dtype>[a-z0-9]+)(?:\[(?P<dims>[^\[\]]*)\])?")


@dataclass(frozen=True)
class VariantInput:
    """A tensor that a variant's functions read.

    Attributes:
        dtype: `"float32"`, `"int32"`, `"int64"` or `"bool"`.
        dims: its dimensions: numbers, `"num_heads"`, `"num_kv_heads"`, `"num_seqs"` or `"*"` for any;
            none: it is one number.

    Examples:
        >>> str(VariantInput("float32", ("num_heads",)))
        'float32[num_heads]'

    """

    dtype: str
    dims: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, name: str, text: str) -> VariantInput:
        """Return an input from its declaration.

        Args:
            name: the input's, for errors.
            text: `"float32"`, `"float32[num_heads]"` or `"int32[num_seqs, *]"`.

        Raises:
            SpecError: the text isn't such a declaration.

        """
        match = _INPUT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match["dtype"] not in INPUT_DTYPES:
            raise SpecError(
                f"inputs[{name!r}]={shown(text)} must be one of {', '.join(INPUT_DTYPES)}, with sizes in "
                "brackets where it is no single number: 'float32[num_heads]'"
            )
        dims: list[int | str] = []
        for word in (match["dims"] or "").replace(" ", "").split(","):
            if word.isdecimal() and int(word):
                dims.append(int(word))
            elif word in SIZES:
                dims.append(word)
            elif word or match["dims"]:
                raise SpecError(
                    f"inputs[{name!r}]={shown(text)}: a size is a positive number{nearest(word, SIZES)}"
                )
        return cls(match["dtype"], tuple(dims))

    def fits(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Return whether a tensor has this shape.

        Args:
            shape: the tensor's.
            sizes: the numbers that names such as `num_heads` stand for.

        """
        wanted = [sizes.get(d, "*") if isinstance(d, str) else d for d in self.dims]
        return len(shape) == len(wanted) and all(
            w in ("*", n) for w, n in zip(wanted, shape, strict=True)
        )

    def __str__(self) -> str:
        return self.dtype + (f"[{', '.join(map(str, self.dims))}]" if self.dims else "")


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """Attention changed by functions of plain torch: of scores, of elements, or of which keys are seen.

    Functions are evaluated for all their arguments at once, as under `flex_attention`: no `if` on them.
    `b` is the sequence's number in the batch, `h` the query head (of keys and values the KV head).
    `q_idx` and `kv_idx` are positions, from 0 for the first key; `d` is an element's place in its head.
    Each may be a path, `"package.module:function"`.

    Functions of elements change queries, keys and values in float32 before bias, rotation and store.
    They may reduce over a head's elements: `.mean(-1, keepdim=True)`. `register_variant` refuses other
    reductions, because they couple requests. For cached keys, `b` and the inputs are those of the step
    that stores them.

    Attributes:
        name: for `LayerSpec.variant`; letters, digits, `_`, `-` and `.`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)`: the new score, from the scaled, capped and
            biased one.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`: whether the query sees the key, beside the spec's
            mask.
        query_mod: `query_mod(query, b, h, q_idx, d)`: the new elements.
        key_mod: `key_mod(key, b, h, kv_idx, d)`.
        value_mod: `value_mod(value, b, h, kv_idx, d)`.
        output_mod: `output_mod(output, b, h, q_idx, d)`.
        feature_mod: `feature_mod(x)`: phi of linear attention with a normaliser (kind `"phi_linear"`), of
            a query's or key's elements, in float32. It has no inputs, and no other function beside it.
        softmax: False: the weights are what `score_mod` returns (FlashSigmoid).
        inputs: tensors that the functions take as keyword arguments, by name: `"float32"` for a number,
            `"float32[num_heads]"`, `"bool[num_seqs, *]"`. The layer or each batch brings them.
        sources: hand-written source for a language (`"triton"`, `"cuda"`, `"jax"`), a text or a `Path`,
            which defines `score_mod` and `mask_mod` as far as the variant has them. It replaces
            generated code; the functions remain the definition.
        summary: for people.

    Raises:
        SpecError: a name, a function, an input or a source isn't one.

    Examples:
        >>> AttentionVariant(name="every_other", mask_mod=lambda b, h, q, k: (q - k) % 2 == 0).softmax
        True

    """

    name: str
    score_mod: Callable[..., Any] | str | None = None
    mask_mod: Callable[..., Any] | str | None = None
    query_mod: Callable[..., Any] | str | None = None
    key_mod: Callable[..., Any] | str | None = None
    value_mod: Callable[..., Any] | str | None = None
    output_mod: Callable[..., Any] | str | None = None
    feature_mod: Callable[..., Any] | str | None = None
    softmax: bool = True
    inputs: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str | Path] = field(default_factory=dict)
    summary: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise SpecError(
                f"AttentionVariant.name={shown(self.name)} can't be a variant's name; use letters, "
                "digits, '_', '-' and '.', 64 at most"
            )
        for field_name in FUNCTIONS:
            value = getattr(self, field_name)
            path = isinstance(value, str) and all(part for part in value.split(":", 1))
            if not (value is None or callable(value) or (path and ":" in value)):
                raise SpecError(
                    f"AttentionVariant.{field_name}={shown(value)} must be a function, its path "
                    "'package.module:function', or None"
                )
        changes = any(getattr(self, name) is not None for name in FUNCTIONS)
        if not changes or (self.score_mod is None and not self.softmax):
            raise SpecError(
                f"variant {self.name!r} changes nothing: set score_mod, mask_mod or a transform, and "
                "score_mod where softmax=False"
            )
        if self.feature_mod is not None:
            self._check_alone()
        if not isinstance(self.softmax, bool):
            raise SpecError(f"AttentionVariant.softmax={shown(self.softmax)} must be True or False")
        if not isinstance(self.inputs, Mapping):
            raise SpecError(f"AttentionVariant.inputs={shown(self.inputs)} must map names to types")
        object.__setattr__(self, "inputs", dict(self.inputs))  # checked values must not change
        for name in self.inputs:
            if not (isinstance(name, str) and name.isidentifier()):
                raise SpecError(f"inputs: {shown(name)} can't be an argument's name")
        self.parsed  # noqa: B018
        self._check_sources()
        for field_name in FUNCTIONS:
            if callable(value := getattr(self, field_name)):
                self.names_of(field_name, value)

    def names_of(self, which: str, function: Callable[..., Any]) -> tuple[str, ...]:
        """Return the names of the inputs that a function takes as keyword arguments.

        Args:
            which: the function's field: `"score_mod"`.
            function: the function.

        Raises:
            SpecError: the function takes other arguments, or an input that isn't declared.

        """
        wanted: tuple[str, ...] = ("score", "b", "h", "q_idx", "kv_idx")[which == "mask_mod" :]
        if which == "feature_mod":
            wanted = ("x",)
        if which in TRANSFORMS:
            place = "kv_idx" if which in ("key_mod", "value_mod") else "q_idx"
            wanted = (which.removesuffix("_mod"), "b", "h", place, "d")
        parameters = inspect.signature(function).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(places) != len(wanted) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise SpecError(
                f"variant {self.name!r}: {which} takes {len(places)} arguments; it must take "
                f"{', '.join(wanted)}, and what inputs declares after a *"
            )
        unknown = sorted(set(names) - set(self.inputs))
        if unknown:
            raise SpecError(
                f"variant {self.name!r}: {which} takes {', '.join(unknown)} by name, and inputs has "
                f"{', '.join(self.inputs) or 'none'}; declare inputs={{{unknown[0]!r}: 'float32'}}"
            )
        return names

    def _check_alone(self) -> None:
        """Refuse linear attention, which has neither scores nor anything else that a variant changes."""
        others = [name for name in FUNCTIONS[:-1] if getattr(self, name) is not None]
        others += [name for name in ("inputs", "sources") if getattr(self, name)]
        if others:
            raise SpecError(
                f"variant {self.name!r}: feature_mod is for linear attention, and {others[0]} for "
                "attention; make two variants of them"
            )

    def _check_sources(self) -> None:
        if not isinstance(self.sources, Mapping):
            raise SpecError(
                f"AttentionVariant.sources={shown(self.sources)} must map languages to texts"
            )
        object.__setattr__(self, "sources", dict(self.sources))
        for language, source in self.sources.items():
            if language not in LANGUAGES:
                raise SpecError(
                    f"variant {self.name!r}: sources has {shown(language)}"
                    f"{nearest(language, LANGUAGES)}; it may have {', '.join(LANGUAGES)}"
                )
            if not isinstance(source, (str, Path)) or not str(source).strip():
                raise SpecError(
                    f"variant {self.name!r}: sources[{language!r}]={shown(source)} must be a text, or "
                    "the Path of a file"
                )
        if self.sources and not self.of_scores:
            raise SpecError(
                f"variant {self.name!r} has sources, and neither score_mod nor mask_mod that they could "
                "stand for; leave them out"
            )

    def source(self, language: str) -> str | None:
        """Return the hand-written source for a language; None if there is none.

        Args:
            language: `"triton"`, `"cuda"` or `"jax"`.

        Raises:
            SpecError: the source's file can't be read.

        """
        source = self.sources.get(language)
        if not isinstance(source, Path):
            return source
        try:
            return source.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(
                f"variant {self.name!r}: sources[{language!r}]={shown(str(source))} can't be read: "
                f"{describe(error)}"
            ) from error

    @property
    def transforms(self) -> bool:
        """Whether the variant changes queries, keys, values or outputs."""
        return any(getattr(self, name) is not None for name in TRANSFORMS)

    @property
    def of_scores(self) -> bool:
        """Whether the variant changes or hides scores, which attention's kernels must do."""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def parsed(self) -> dict[str, VariantInput]:
        """The inputs, by name."""
        return {name: VariantInput.parse(name, text) for name, text in self.inputs.items()}

    def __hash__(self) -> int:
        return hash(self.name)
