"""What have layers of all families in common? A group, its plans, and a number for compiled graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from polyattn.errors import BatchError, SpecError, flag
from polyattn.runtime.cache.kv_cache import KVCache
from polyattn.runtime.cache.scales import output_dtype
from polyattn.runtime.graphs import torch_compile
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import (
    Expected,
    capturing,
    check_apart,
    check_tensor,
    check_tensors,
    compiling,
    own_precision,
    refuse_gradients,
    side_by_side,
)
from polyattn.runtime.program import Frame, LayerParams
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_on_device
from polyattn.runtime.step.chosen_pages import check_ids, choice_of, expected_choice
from polyattn.selection.selection import Selection
from polyattn.settings import current_settings
from polyattn.spec.layer import LayerSpec

NAMES = {
    "attention": "Attention",
    "mla": "LatentAttention",
    "recurrent": "Recurrent",
    "sparse": "SparseAttention",
}
"""The layer of each family."""
Output: TypeAlias = Any
"""A layer's output, or with `needs_lse` (output, LSE): only the spec knows which."""


class Layer(nn.Module, ABC):
    """One layer on the selected backends; `family` is whose. Raises `SpecError` for another's spec.

    `group`, `checks` and `own_keys` as `Attention` takes them; raises what `LayerGroup` raises, too.
    """

    family: ClassVar[str]

    def __init__(
        self, group: LayerGroup | Selection | LayerSpec, checks: bool | None, own_keys: bool = True
    ):
        super().__init__()
        flag("own_keys", own_keys)
        # A selection doesn't know `kv_source`: layers that share a cache share a group.
        reads = isinstance(group, LayerSpec) and group.kv_source is not None
        self.own_keys = own_keys and not reads
        self.group = group if isinstance(group, LayerGroup) else LayerGroup(group)
        self.spec = self.group.spec
        needed = self.spec.kind.family
        if needed != self.family:
            raise SpecError(
                f"{self.spec} is no layer for {NAMES[self.family]}; use {NAMES[needed]}"
            )
        if checks is not None:
            flag("checks", checks)
        self.checks = current_settings().checks if checks is None else checks
        # Not None, so that the first call checks its cache.
        self._known_cache: Any = _Unseen
        self._handle = torch_compile.handle(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` does, by way of `nn.Module` where there are hooks.

        That way touches code that a cold call waits for: a sixth of a sparse decode's host time.

        Args:
            args: as `forward` takes them.
            kwargs: likewise.

        """
        if (
            self._compiled_call_impl is not None
            or self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or modules._global_forward_hooks
            or modules._global_forward_pre_hooks
            or modules._global_backward_hooks
            or modules._global_backward_pre_hooks
            or torch._C._get_tracing_state()
        ):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def plan(self, batch: Batch) -> StepPlan:
        """Return a step's plan for all layers of the group: what `forward` takes as `plan`.

        Args:
            batch: the step's sequences.

        Raises:
            BatchError: the batch doesn't fit the group's layers.

        """
        return self.group.plan(batch)

    def refuse_keys(self, key: Tensor | None) -> None:
        """Refuse to write to another layer's cache.

        Args:
            key: what the layer is to store, or None.

        Raises:
            BatchError: there is something to store, and the layer reads another's keys.

        """
        if key is not None and not self.own_keys:
            raise BatchError(
                "this layer reads another's keys (kv_source, or own_keys=False), and what it is to store "
                "would overwrite them; pass None for both, and a query that isn't fused"
            )

    @abstractmethod
    def output_shape(self, tokens: int) -> tuple[int, ...]:
        """Return the shape of the output.

        Args:
            tokens: the step's tokens.

        """

    @abstractmethod
    def run(
        self,
        step: Any,
        inputs: Sequence[Tensor | None],
        cache: Any,
        out: Tensor,
        lse: Tensor | None = None,
        fresh: bool = False,
    ) -> Tensor:
        """Check the tensors and run the step: a compiled graph calls this. Writes `lse`.

        Args:
            step: the plan.
            inputs: the tensors that `forward` takes, in its order; the choice last, where it takes one.
            cache: the cache, or the states.
            out: `output_shape(num_tokens)`.
            lse: float32 (num_tokens, num_heads), or None.
            fresh: whether nobody else holds `out` yet.

        Returns:
            `out`, written; or, if that is fresh, the tensor that a library made in its place.

        Raises:
            BatchError: a tensor has another shape, dtype or device.
            CacheError: the cache isn't of the group's form.

        """

    def _called(
        self,
        name: str,
        inputs: Sequence[Tensor | None],
        cache: Any,
        plan: StepPlan | Batch | None,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Make the arguments that the caller leaves out, and run. `name`: the first, required input's."""
        if compiling():
            return torch_compile.traced(self, inputs, cache, plan, out)
        step, first = self.group.plan_for(plan), inputs[0]
        check_tensor(name, first, self.group.torch_device, cache is self._known_cache)
        assert first is not None
        result, lse = self.outputs(first, step.batch.num_tokens, out)
        result = self.run(step, inputs, cache, result, lse, fresh=out is None)
        return result if lse is None else (result, lse)

    def outputs(
        self, first: Tensor, tokens: int, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return a step's output, the caller's or a new one, and room for its LSE, if the layer has one.

        Args:
            first: the first input, of whose device they are.
            tokens: the step's tokens.
            out: the caller's output, or None.

        """
        shape = self.output_shape(tokens)
        if out is None:
            dtype = output_dtype(self.spec)
            if first.shape == shape and first.dtype is dtype and first.is_contiguous():
                out = torch.empty_like(first)  # which torch takes half the time for
            else:
                out = first.new_empty(shape, dtype=dtype)
        lse = None
        if self.spec.needs_lse:
            lse = first.new_empty(shape[:2], dtype=torch.float32)
        return out, lse

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known_cache": _Unseen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = torch_compile.handle(self)

    def extra_repr(self) -> str:
        """Return the layer's description for `print(model)`."""
        return f"{self.spec}; {self.group.selection.decision.summary()}"


class _Unseen:
    """Stands for no cache at all, in a new, copied or pickled layer."""


class ChoosingLayer(Layer):
    """A layer whose calls may choose the cache's rows that each token attends to."""

    brings: ClassVar[tuple[str, str]] = ("key", "value")
    """What a call stores, by its argument's names."""
    _dtype: torch.dtype

    @property
    @abstractmethod
    def params(self) -> LayerParams:
        """What differs between layers of one group, as it is now."""

    @abstractmethod
    def _shapes(self, step: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a call's query and other inputs. Raises `BatchError`."""

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a call's inputs in the form that the cache takes."""
        return key, value

    def run(
        self,
        step: Any,
        inputs: Sequence[Tensor | None],
        cache: KVCache,
        out: Tensor,
        lse: Tensor | None = None,
        fresh: bool = False,
    ) -> Tensor:
        query, key, value, choice = inputs
        spec, tokens, device = self.spec, step.batch.num_tokens, self.group.torch_device
        seen = cache is self._known_cache
        assert query is not None
        if spec.sparse is not None:
            choice = choice_of(spec, choice, step.batch)
        elif choice is not None:
            raise BatchError(f"choice was given: {spec} attends to every token; leave it out")
        if (key is None) != (value is None):
            raise BatchError(f"{' and '.join(self.brings)} come together, or both are None")
        self.refuse_keys(key)
        dtype, shapes = self._dtype, self._shapes(step)
        expected: dict[str, Expected] = {
            "query": (query, shapes[0], dtype),
            "out": (out, self.output_shape(tokens), dtype),
        }
        if key is not None:
            tensors = zip(self.brings, (key, value), shapes[1:], strict=True)
            expected |= {name: (tensor, shape, dtype) for name, tensor, shape in tensors}
        if choice is not None:
            expected["choice"] = expected_choice(spec, choice, tokens, device, seen)
        check_tensors(device, seen, **expected)
        others = (
            {}
            if seen or fresh
            else {"query": query, **dict(zip(self.brings, (key, value), strict=True))}
        )
        check_apart(out, **others)
        if not seen:
            self.group.check_cache(cache)
            self._known_cache = cache
        refuse_gradients(**{name: tensor for name, (tensor, *_) in expected.items()})
        if self.checks:
            self._check_values(step.batch, cache, choice)
        if key is not None and value is not None:
            key, value = (side_by_side(each) for each in self._stored(key, value))
        query = side_by_side(query)
        frame = Frame(query, key, value, cache, self.params, out, lse, choice, fresh)
        with own_precision(self.group.device_type):
            step.run(frame)
        return frame.out

    def _check_values(self, batch: Batch, cache: KVCache, choice: Tensor | None) -> None:
        """Check what costs a copy to the host. Raises `BatchError`."""
        if capturing(cache.key):
            return
        sparse = self.spec.sparse
        if sparse is None or sparse.tokens_per_entry == 1:
            check_on_device(batch, cache.num_blocks, cache.block_size)
        # A captured step's buffers may hold ids of no row.
        if sparse is not None and choice is not None and not batch.lens_are_bounds:
            check_ids(sparse, choice, cache)
