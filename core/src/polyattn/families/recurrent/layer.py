"""What fills attention's place? `Recurrent`, one layer with a state for each sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyattn.errors import BatchError, SpecError, nearest
from polyattn.families.recurrent.planning import RecurrentStep
from polyattn.runtime.cache.kv_cache import STORAGE_DTYPES
from polyattn.runtime.cache.state_cache import StateCache, StateCacheSpec
from polyattn.runtime.group import LayerGroup, StepPlan
from polyattn.runtime.inputs import (
    bad_input,
    capturing,
    check_apart,
    check_tensor,
    check_tensors,
    own_precision,
    refuse_gradients,
    side_by_side,
)
from polyattn.runtime.layer import Layer
from polyattn.runtime.parameters import Weight, check_shape
from polyattn.runtime.program import RecurrentFrame
from polyattn.runtime.step.batch import Batch
from polyattn.runtime.step.batch_checks import check_state_slots
from polyattn.selection.selection import Selection
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import GATES, form_of, shape_of


def input_dtype(spec: LayerSpec, name: str) -> torch.dtype:
    """Return the dtype that an input of a layer has; of gates, the narrower one that they may have."""
    assert spec.recurrent is not None
    wide = spec.recurrent.bc_in_float32 and name in ("B", "C") and spec.dtype != "float64"
    return torch.float32 if wide else STORAGE_DTYPES[spec.dtype]


class Recurrent(Layer):
    """One recurrent layer on the selected backends. Forward only: it refuses gradients.

    The short convolution before a Mamba or delta-rule layer is a layer of its own, of
    `polyattn.spec.decompose.convolution(spec)`.

    Args:
        group: as `Attention` takes it.
        checks: check state slots at each step; None: the setting `checks`.
        params: the tensors that `polyattn.spec.recurrence.FORMS` names for the kind, with their shapes.
            They are referenced as `Attention` references its sinks, and read as float32;
            `layer.weights[name]` is each one's `Weight`.

    Raises:
        SpecError: a parameter is missing, unknown or of another shape.
        SelectionError, PluginError: as `LayerGroup`.

    Examples:
        >>> conv = RecurrentSpec(conv_width=4, activation="silu")
        >>> spec = LayerSpec(
        ...     kind="short_conv", num_heads=8, head_size=1, dtype="float32", recurrent=conv
        ... )
        >>> layer = Recurrent(spec, weight=torch.randn(8, 4))
        >>> states = layer.group.allocate_states(num_slots=1)
        >>> batch = Batch.from_lens([5], [5], state_slots=torch.tensor([0]))
        >>> layer(torch.randn(5, 8), states=states, plan=layer.group.plan(batch)).shape
        torch.Size([5, 8])

    """

    family = "recurrent"

    def __init__(
        self,
        group: LayerGroup | Selection | LayerSpec,
        *,
        checks: bool | None = None,
        **params: Tensor,
    ):
        super().__init__(group, checks)
        spec = self.spec
        self.form = form_of(spec)
        self.dtype = STORAGE_DTYPES[spec.dtype]
        self._states_spec = StateCacheSpec.for_layer(spec, 1)
        self.weights = self._checked_params(params)

    def _checked_params(self, tensors: Mapping[str, Tensor]) -> dict[str, Weight]:
        spec, form = self.spec, self.form
        for name in tensors:
            if name not in form.params:
                hint = "; A is -exp(A_log)" if name == "A_log" else nearest(name, form.params)
                raise SpecError(f"{spec.kind.value} has no parameter {name!r}{hint}")
        weights = {}
        dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        device = self.group.torch_device
        for name, letters in form.params.items():
            if name not in tensors:
                if name in form.optional:
                    continue
                raise SpecError(f"parameter {name} of {spec.kind.value} is missing")
            tensor, shape = tensors[name], shape_of(spec, letters)
            check_shape(name, tensor, shape)
            weights[name] = Weight(name, tensor, device, dtype)
        return weights

    @property
    def params(self) -> dict[str, Tensor]:
        """The layer's parameters as they are now, as kernels read them."""
        return {name: weight.current() for name, weight in self.weights.items()}

    def output_shape(self, tokens: int) -> tuple[int, ...]:
        return shape_of(self.spec, self.form.output, tokens)

    def forward(
        self,
        *inputs: Tensor,
        states: StateCache,
        plan: StepPlan | Batch | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run the recurrence over the step's tokens and leave each sequence's new state in its slot.

        Args:
            inputs: packed tensors (num_tokens, ...) in the order of the layer's form (Mamba-2: x, dt,
                B, C, and z if it is gated), in the layer's dtype; dt, g and beta may be float32.
            states: the layer's states.
            plan: as `Attention.forward` takes it.
            out: (num_tokens, ...), written and returned.

        Returns:
            The output, as the form shapes it.

        Raises:
            BatchError: a tensor doesn't fit the plan; nothing has changed.

        """
        if not inputs:  # with inputs, the first one has the output's device
            self._named(inputs, 0)
        result = self._called(next(iter(self.form.inputs)), inputs, states, plan, out)
        assert isinstance(result, Tensor)
        return result

    if TYPE_CHECKING:
        __call__ = forward

    def run(
        self,
        step: RecurrentStep,
        inputs: Sequence[Tensor | None],
        cache: StateCache,
        out: Tensor,
        lse: Tensor | None = None,
        fresh: bool = False,
    ) -> Tensor:
        device, tokens = self.group.torch_device, step.batch.num_tokens
        named = self._named(inputs, tokens)
        check_tensors(device, out=(out, self.output_shape(tokens), self.dtype))
        if not out.is_contiguous():
            raise BatchError(f"out has strides {out.stride()}; a recurrence's output is contiguous")
        if not fresh and (self.checks or cache is not self._known_cache):
            check_apart(out, **named)
            self._known_cache = cache
        if not isinstance(cache, StateCache):
            raise BatchError(f"states is a {type(cache).__name__}; it must be a StateCache")
        check_tensor("states", cache.data, device)
        wanted = self._states_spec
        dtype = STORAGE_DTYPES[wanted.dtype]
        if cache.data.shape[1:] != wanted.shape or cache.data.dtype is not dtype:
            raise bad_input("states", cache.data, ("slots", *wanted.shape), dtype)
        refuse_gradients(**named)
        if step.num_slots > cache.num_slots or (self.checks and not capturing(out)):
            check_state_slots(step.batch, cache.num_slots)
        with own_precision(self.group.device_type):
            frame = RecurrentFrame(named, self.params, cache.data, out, fresh)
            step.run(frame)
        return frame.out

    def _named(self, inputs: Sequence[Tensor | None], tokens: int) -> dict[str, Tensor]:
        form, spec = self.form, self.spec
        if len(inputs) != len(form.inputs):
            raise BatchError(
                f"{spec.kind.value} takes {', '.join(form.inputs)}; {len(inputs)} tensors were given"
            )
        named: dict[str, Tensor] = {}
        for name, tensor in zip(form.inputs, inputs, strict=True):
            check_tensor(name, tensor, self.group.torch_device)
            assert tensor is not None
            shape = shape_of(spec, form.inputs[name], tokens)
            dtype = input_dtype(spec, name)
            fits = tensor.dtype is dtype or (name in GATES and tensor.dtype is torch.float32)
            if tensor.shape != shape or not fits:
                raise bad_input(name, tensor, shape, dtype)
            named[name] = side_by_side(tensor)
        return named
