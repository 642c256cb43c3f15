"""Turns a function into a backend. Its parameters' names select its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polyattn.errors import PluginError, nearest, shown
from polyattn.registry.capabilities import ANY_SIZE, Capabilities, Sizes, one_of
from polyattn.registry.hooks import hookimpl
from polyattn.registry.info import API_VERSION, BackendInfo
from polyattn.registry.validate import problems
from polyattn.runtime.backend import AttentionBackend
from polyattn.runtime.cache.scales import write_output
from polyattn.runtime.conventions import blank, cumulative
from polyattn.runtime.program import Frame, LayerParams, Plan
from polyattn.runtime.step.batch import Batch
from polyattn.spec.features import FEATURES
from polyattn.spec.key_ranges import KeyRanges, key_ranges, window_sizes
from polyattn.spec.kinds import Role
from polyattn.spec.layer import LayerSpec

_ALWAYS = frozenset(
    {
        "query", "key", "value", "scale", "causal", "window", "logit_soft_cap", "sinks",
        "alibi_slopes", "out", "lse", "return_lse",
    }
)  # fmt: skip
_STEP = frozenset({"query_start_loc", "seq_lens", "max_query_len", "max_seq_len"})
PARAMETERS = {
    "sequence": _ALWAYS | {"mask"},
    "packed": _ALWAYS | _STEP | {"key_start_loc"},
    "pages": _ALWAYS | _STEP | {"block_table", "chunk_size", "sink_tokens", "k_scale", "v_scale"},
}
"""What a function may take, by its form: a sequence a call, packed sequences, or a cache's pages."""
READ_BY: dict[str, tuple[str, ...]] = {
    "causal": (),
    "non_causal": (),
    "gqa": (),
    "v_head_size": (),
    "deterministic": (),
    "batch_invariant": (),
    "step_invariant": (),
    "call_invariant": (),
    "sliding_window": ("window", "mask"),
    "window_right": ("window", "mask"),
    "chunked": ("chunk_size", "mask"),
    "sink_tokens": ("sink_tokens", "mask"),
    "logit_soft_cap": ("logit_soft_cap",),
    "alibi": ("alibi_slopes",),
    "learned_sinks": ("sinks",),
    "lse": ("lse", "return_lse"),
}
"""The features that a function can claim. Each needs one of these parameters."""
CLAIMS = frozenset(field.name for field in fields(Capabilities)) - {
    "kinds", "cached", "latent_ranks", "latent_ropes", "topks", "conv_widths",
    "conv_channels", "fp8_compute", "shared_prefix", "shared_features",
    "state_targets", "padding_rows", "mixes_tails", "by_address", "rotates", "graph_capture",
}  # fmt: skip
"""The claims that a function can make; the others speak of plans, or of other kinds of layers."""
REQUIRED: dict[str, Any] = {
    "platforms": "cpu",
    "dtypes": ("float32", "bfloat16"),
    "head_sizes": (64, 128),
    "features": ("causal", "gqa"),
    "block_sizes": (16, 32),
}
"""What a function must claim, each with an example; `block_sizes` where it reads pages."""
_INFO = frozenset(
    {"summary", "probe", "requires", "install", "priorities", "proof", "by_name_only"}
)


class FunctionPlan(Plan):
    """A step, and which of its tokens see no key: `blind`, bool (num_tokens,), or None for none."""

    __slots__ = ("blind",)

    def __init__(self, batch: Batch, blind: Tensor | None):
        super().__init__(batch)
        self.blind = blind


@dataclass(frozen=True)
class _Call:
    """What one call of the function may ask for. `index`: the sequence, -1 for all of them."""

    spec: LayerSpec
    batch: Batch
    index: int
    params: LayerParams
    tensors: dict[str, Tensor | None]

    def value(self, name: str) -> Any:
        """Return the argument for a parameter of this name."""
        if name in self.tensors:
            return self.tensors[name]
        if name == "window":
            return window_sizes(self.spec)
        if name == "mask":
            return self._mask()
        if name == "return_lse":
            return self.tensors["lse"] is not None
        for holder in (self.params, self.spec, self.batch):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise PluginError(f"a function's parameter {name!r} has no value")

    def _mask(self) -> Tensor:
        ranges, first, length = _ranges(self.spec, self.batch, self.index)
        columns = (np.asarray(bound).reshape(-1, 1) for bound in ranges)
        kept_start, kept_stop, near_start, near_stop = columns
        at = np.arange(first, first + length)[None]
        seen = ((at >= kept_start) & (at < kept_stop)) | ((at >= near_start) & (at < near_stop))
        queries = self.batch.query_lens[self.index]
        return torch.from_numpy(np.broadcast_to(seen, (queries, length)).copy()).to(
            self.batch.device
        )


class FunctionBackend(AttentionBackend):
    """A backend that calls one function. `backend` derives it, and it is also its own plugin."""

    function: ClassVar[Callable[..., Any]]
    parameters: ClassVar[tuple[str, ...]]
    form: ClassVar[str]
    info: ClassVar[BackendInfo]

    @classmethod
    @hookimpl
    def polyattn_api_versions(cls) -> tuple[int, int]:
        """Say that it works with this version of polyattn."""
        return (API_VERSION, API_VERSION)

    @classmethod
    @hookimpl
    def polyattn_backends(cls) -> list[BackendInfo]:
        """Declare itself."""
        return [cls.info]

    def plan(self, batch: Batch, reuse: Plan | None = None) -> FunctionPlan:
        """Mark the tokens that see no key. Their output is 0, whatever the function returns."""
        spec, rows = self.spec_of(batch), []
        for index, count in enumerate(batch.query_lens):
            seen, _, _ = _ranges(spec, batch, index)
            empty = (seen.kept_stop <= seen.kept_start) & (seen.near_stop <= seen.near_start)
            rows.append(np.broadcast_to(empty, (count,)))
        blind = np.concatenate(rows) if rows else np.zeros(0, dtype=bool)
        return FunctionPlan(
            batch, torch.from_numpy(blind).to(batch.device) if blind.any() else None
        )

    def run(self, plan: FunctionPlan, frame: Frame) -> None:
        """Call the function, once for each sequence or for all of them."""
        cache = frame.cache
        batch, spec = plan.batch, self.spec_of(plan.batch)
        tensors = {
            "query": frame.query,
            "key": frame.key,
            "value": frame.value,
            "out": frame.out,
            "lse": frame.lse,
        }
        if cache is not None:
            tensors |= {"key": cache.key, "value": cache.value}
        if self.form == "sequence":
            for index, length in enumerate(batch.lens):
                rows = slice(batch.starts[index], batch.starts[index + 1])
                if length and rows.stop > rows.start:
                    keys = slice(batch.key_starts[index], batch.key_starts[index] + length)
                    part = {"query": rows, "out": rows, "lse": rows, "key": keys, "value": keys}
                    own = {
                        name: None if x is None else x[part[name]] for name, x in tensors.items()
                    }
                    self._call(_Call(spec, batch, index, frame.params, own))
        elif batch.num_tokens and any(batch.lens):
            if self.form == "packed":
                tensors |= {name: packed(batch, tensors[name]) for name in ("key", "value")}
                tensors["key_start_loc"] = cumulative(batch.seq_lens)
            self._call(_Call(spec, batch, -1, frame.params, tensors))
        blank(plan.blind, frame.out, frame.lse)

    def _call(self, call: _Call) -> None:
        answer = type(self).function(**{name: call.value(name) for name in self.parameters})
        out, lse = call.tensors["out"], call.tensors["lse"]
        assert out is not None
        returned_lse = None
        if lse is not None and "return_lse" in self.parameters:
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise PluginError(
                    f"{self.info.name}: with return_lse=True the function returned {shown(answer)}; it "
                    "must return (output, LSE)"
                )
            answer, returned_lse = answer
        if "out" not in self.parameters:
            self._check("an output", answer, out)
            write_output(out, answer, call.params.out_scale)
        if lse is not None and "return_lse" in self.parameters:
            self._check("an LSE", returned_lse, lse)
            lse.copy_(returned_lse)  # type: ignore[arg-type]

    def _check(self, what: str, answer: Any, like: Tensor) -> None:
        shape = tuple(answer.shape) if isinstance(answer, Tensor) else shown(answer)
        if shape != tuple(like.shape):
            words = "(tokens, heads, size)" if like.dim() == 3 else "(tokens, heads)"
            raise PluginError(
                f"{self.info.name}: the function returned {what} of shape {shape}; it must be {words}, "
                f"here {tuple(like.shape)}"
            )


def _ranges(spec: LayerSpec, batch: Batch, index: int) -> tuple[KeyRanges, int, int]:
    """Return the visible keys of a sequence's queries: the first key's position, and their number."""
    length, count = batch.lens[index], batch.query_lens[index]
    first = 0 if batch.first_positions is None else batch.first_positions[index]
    at = np.arange(first + length - count, first + length)
    seen = key_ranges(spec, at, at, np.int64(first + length), np.minimum, np.maximum)
    # What lies before the first key isn't there.
    return KeyRanges(*(np.maximum(bound, first) for bound in seen)), first, length


def packed(batch: Batch, tensor: Tensor | None) -> Tensor | None:
    """Return keys or values with sequences one after another; without a copy if they lie so."""
    if tensor is None or batch.keys_packed:
        return tensor
    spans = zip(batch.key_starts, batch.lens, strict=True)
    return torch.cat([tensor[start : start + length] for start, length in spans])


def backend(name: str, **claims: Any) -> Callable[[Callable[..., Any]], type[FunctionBackend]]:
    """Make a function a backend. The function's parameters say what it gets.

    The function takes `query`, `key`, `value` and `scale`. Its form follows from the other names:

    - one sequence a call: `query` (queries, heads, size), `key` and `value` (keys, KV heads, size).
    - packed, with `query_start_loc`: the same for all sequences, one after another.
    - pages, with `block_table`: `key` and `value` (blocks, block size, KV heads, size) are the cache.
      Without `query_start_loc` it serves decodes alone: one query token a sequence.

    It returns the output (queries, heads, V size), and with `return_lse` True also the LSE (queries,
    heads). A function that takes `out` and `lse` writes to them instead.

    Args:
        name: the backend's name.
        claims: what the function can do, by the names of `Capabilities`, and fields of `BackendInfo`
            such as `priorities`. `platforms`, `dtypes`, `head_sizes` and `features` are required, for
            pages `block_sizes` too. Tuples, sets, single values and `Sizes` are accepted.

    Returns:
        The decorator. What it makes is a plugin, too: `polyattn.register` takes it, and a plugin's entry
        point may name it.

    Raises:
        PluginError: a parameter or a claim is unknown, or a claim has no parameter to read.

    Examples:
        >>> @backend("MINE", platforms="cpu", dtypes="float32", head_sizes=64, features="causal")
        ... def mine(query, key, value, mask, scale):
        ...     scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        ...     weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        ...     return torch.einsum("hqk,khd->qhd", weights, value)

    """

    def decorate(function: Callable[..., Any]) -> type[FunctionBackend]:
        declaration = declared(function, name, claims)
        if not function.__qualname__.isidentifier():
            raise PluginError(
                f"backend {name}: {function.__qualname__} can't be loaded by its name; move the function "
                "to its module's top level"
            )
        return declaration

    return decorate


def declared(
    function: Callable[..., Any], name: str, claims: Mapping[str, Any]
) -> type[FunctionBackend]:
    """Return the backend of a function with these claims. Raises `PluginError`."""
    names = parameters_of(function)
    form = form_of(names)
    _check_parameters(name, names, form)
    about = {field: value for field, value in claims.items() if field in _INFO}
    stated_claims = {field: value for field, value in claims.items() if field not in _INFO}
    caps = _capabilities(name, names, form, stated_claims)
    about.setdefault("summary", next(iter((function.__doc__ or name).strip().splitlines())))
    path = f"{function.__module__}:{function.__qualname__}"
    info = BackendInfo(name=name.upper(), path=path, capabilities=caps, **about)
    wrong = [text for text in problems(info) if not text.startswith("BackendInfo.path")]
    if wrong:
        raise PluginError(f"backend {name}: {'; '.join(wrong)}")
    body = {
        "name": info.name,
        "function": staticmethod(function),
        "parameters": names,
        "form": form,
        "info": info,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__qualname__": function.__qualname__,
    }
    return type(function.__name__, (FunctionBackend,), body)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters. Raises `PluginError`."""
    if not inspect.isfunction(function):
        raise PluginError(f"{shown(function)} is no function; a backend is made of a plain one")
    return tuple(inspect.signature(function).parameters)


def form_of(names: Iterable[str]) -> str:
    """Return `"pages"`, `"packed"` or `"sequence"`, from a function's parameters."""
    names = set(names)
    if "block_table" in names:
        return "pages"
    return "packed" if "query_start_loc" in names else "sequence"


def _check_parameters(name: str, names: tuple[str, ...], form: str) -> None:
    known = PARAMETERS[form]
    for parameter in names:
        if parameter not in known:
            raise PluginError(
                f"backend {name}: parameter {parameter!r} is unknown{nearest(parameter, known)}; over "
                f"{form} a function may take {', '.join(sorted(known))}"
            )
    required = {"sequence": (), "packed": ("key_start_loc",), "pages": ("seq_lens",)}[form]
    for parameter in ("query", "key", "value", "scale", *required):
        if parameter not in names:
            raise PluginError(
                f"backend {name}: the function has no parameter {parameter!r}; add it"
            )


def _capabilities(
    name: str, names: tuple[str, ...], form: str, stated_claims: dict[str, Any]
) -> Capabilities:
    for claim in stated_claims:
        if claim not in CLAIMS:
            raise PluginError(
                f"backend {name}: a function can't claim {claim!r}{nearest(claim, CLAIMS)}; write a "
                "class for what needs a plan"
            )
    for claim in REQUIRED:
        if claim not in stated_claims and (claim != "block_sizes" or form == "pages"):
            raise PluginError(
                f"backend {name}: {claim}= is missing; state what the function can do, as "
                f"{claim}={REQUIRED[claim]!r} does"
            )
    known = {field.name: str(field.type) for field in fields(Capabilities)}
    claims = {}
    for claim, value in stated_claims.items():
        try:
            claims[claim] = _typed(known[claim], value)
        except ValueError as error:
            raise PluginError(f"backend {name}: {claim}={shown(value)}: {error}") from error
    for feature in sorted(claims["features"] & set(FEATURES)):
        wanted = READ_BY.get(feature)
        if wanted is None:
            raise PluginError(
                f"backend {name}: a function can't claim {feature!r}; write a class for it"
            )
        if wanted and not set(wanted) & set(names):
            raise PluginError(
                f"backend {name} claims {feature!r}, but the function has no parameter "
                f"{' or '.join(map(repr, wanted))}"
            )
    both = {"causal", "non_causal"} <= claims["features"]
    if both and not {"causal", "window", "mask"} & set(names):
        raise PluginError(
            f"backend {name} claims 'causal' and 'non_causal', but the function has no parameter 'causal'"
        )
    if claims.get("kv_cache_dtypes", {"auto"}) != {"auto"} and not {"k_scale", "v_scale"} <= set(
        names
    ):
        raise PluginError(
            f"backend {name} claims kv_cache_dtypes, but has no parameters 'k_scale' and 'v_scale'"
        )
    claims["cached"] = frozenset({form == "pages"})
    if form == "pages" and "query_start_loc" not in names:
        claims.setdefault("phases", frozenset({"decode"}))
    blocks = claims.get("block_sizes", ANY_SIZE)
    if "preferred_block_size" not in claims and 16 not in blocks:
        claims["preferred_block_size"] = blocks.examples(range(1, 4097))[0]
    try:
        return Capabilities(**claims)
    except ValueError as error:
        raise PluginError(f"backend {name}: {error}") from error


def _typed(annotation: str, value: Any) -> Any:
    """Return a claim in the type of its field, from a single value or any collection of them."""
    if annotation.startswith("Mapping") and not isinstance(value, Mapping):
        return dict.fromkeys(_several(value), ())
    if annotation == "Sizes" and not isinstance(value, Sizes):
        return one_of(*_several(value))
    if annotation == "frozenset[Role]":
        return frozenset(map(Role, _several(value)))
    if annotation.startswith("frozenset"):
        return frozenset(_several(value))
    if annotation == "tuple[str, ...]":
        return tuple(_several(value))
    return value


def _several(value: Any) -> Iterable[Any]:
    return (value,) if isinstance(value, str | int) or not isinstance(value, Iterable) else value
