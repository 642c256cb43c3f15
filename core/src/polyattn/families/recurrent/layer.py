"""What fills attention's place? `Recurrent`, one layer with a state a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polyattn.api import select_for_layer
from polyattn.errors import BatchError, SpecError, nearest
from polyattn.registry.info import BackendInfo
from polyattn.runtime.backend import RecurrentBackend
from polyattn.runtime.batch import Batch, check_lens_against_table, check_state_slots
from polyattn.runtime.group import capturing, load_backend
from polyattn.runtime.kv_cache import STORAGE_DTYPES
from polyattn.runtime.state_cache import StateCache, StateCacheSpec
from polyattn.settings import current
from polyattn.spec.layer import LayerSpec
from polyattn.spec.recurrence import GATES, form_of, shape_of

if TYPE_CHECKING:
    from polyattn.api import Selection


class RecurrentRuntime:
    """The loaded backends of one recurrent selection and the plan of the current step."""

    def __init__(self, selection: Selection):
        self.spec, self.device = selection.decision.spec, selection.decision.device
        assert selection.decode is not None
        self.prefill = self._load(selection.prefill)
        self.decode = self._load(selection.decode)  # each phase keeps a plan of its own
        self.checks = False
        self.batch: Batch | None = None
        self._split = 0

    def _load(self, info: BackendInfo) -> RecurrentBackend:
        return load_backend(info, self.spec, self.device, RecurrentBackend)

    def plan(self, batch: Batch) -> None:
        """Prepare one step for every layer of the selection. Raises `BatchError`."""
        check_lens_against_table(batch, None)
        if batch.state_slots is None and batch.num_seqs:
            raise BatchError(f"{self.spec} keeps a state; the batch has no state_slots")
        self.batch = None  # a plan that fails half-way must not look current
        self._split = batch.num_decodes
        if self._split < batch.num_seqs:
            self.prefill.plan(batch.part(self._split, batch.num_seqs))
        if self._split:
            self.decode.plan(batch.part(0, self._split))
        self.batch = batch

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        states: Tensor,
        out: Tensor,
    ) -> None:
        """Run the step as planned. Writes `out` and the batch's slots of `states`."""
        batch = self.batch
        assert batch is not None, "plan(batch) comes before forward"
        at = self._split  # one token a decode, so the split of sequences is that of tokens
        if at == batch.num_seqs:
            if at:
                self.decode.forward_decode(inputs, params, states, out)
        elif at == 0:
            self.prefill.forward_prefill(inputs, params, states, out)
        else:
            first = {name: tensor[:at] for name, tensor in inputs.items()}
            self.decode.forward_decode(first, params, states, out[:at])
            rest = {name: tensor[at:] for name, tensor in inputs.items()}
            self.prefill.forward_prefill(rest, params, states, out[at:])


class Recurrent(nn.Module):
    """One recurrent layer on the selected backends.

    Built from a `Selection` it shares that selection's plan with the other layers built from it.
    `params` are the tensors that `polyattn.spec.recurrence.FORMS` names, kept as float32
    on the selection's device. `checks`: check state slots each step (default: setting `checks`).

    The short convolution before a Mamba or delta-rule layer is a layer of its own, of
    `polyattn.spec.decompose.convolution(spec)`. Raises `SpecError`, and what `select` raises.
    """

    def __init__(
        self, selection: Selection | LayerSpec, *, checks: bool | None = None, **params: Tensor
    ):
        super().__init__()
        if isinstance(selection, LayerSpec):
            selection = select_for_layer(selection)
        self.selection, spec = selection, selection.spec
        self.form = form_of(spec)
        runtime = selection.runtime
        assert isinstance(runtime, RecurrentRuntime)
        self.runtime = runtime
        self.runtime.checks |= current().checks if checks is None else checks
        self._dtype = STORAGE_DTYPES[spec.dtype]
        self.params = self._checked_params(params)

    def _checked_params(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        spec, form = self.selection.spec, self.form
        for name in given:
            if name not in form.params:
                raise SpecError(
                    f"{spec.kind.value} has no parameter {name!r}{nearest(name, form.params)}"
                )
        found = {}
        dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        device = self.selection.device.torch_device
        for name, letters in form.params.items():
            if name not in given:
                if name in form.optional:
                    continue
                raise SpecError(f"parameter {name} of {spec.kind.value} is missing")
            tensor, shape = given[name], shape_of(spec, letters)
            if tensor.shape != shape:
                raise SpecError(f"{name} has shape {tuple(tensor.shape)}; it must be {shape}")
            found[name] = tensor.detach().to(device, dtype).contiguous()
        return found

    def plan(self, batch: Batch) -> None:
        """Prepare one step for all layers of this selection; `forward` does it when it wasn't."""
        self.runtime.plan(batch)

    def state_spec(self, num_slots: int) -> StateCacheSpec:
        """Return the state cache that the layer works on."""
        return StateCacheSpec.for_layer(self.selection.spec, num_slots)

    def forward(
        self,
        *inputs: Tensor,
        states: StateCache,
        batch: Batch | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run the recurrence over the step's tokens and leave each sequence's new state in its slot.

        `inputs` in the order of the layer's form (Mamba-2: x, dt, B, C), packed, (num_tokens, …) in
        the layer's dtype; dt, g and beta may be float32. Returns the output, written to `out` where
        given. Raises `BatchError`; nothing was changed then.
        """
        runtime = self.runtime
        if batch is not None and batch is not runtime.batch:
            runtime.plan(batch)
        batch = runtime.batch
        if batch is None:
            raise BatchError("no batch: pass batch=, or call plan(batch) first")
        named = self._named(inputs, batch.num_tokens)
        spec = self.selection.spec
        shape = shape_of(spec, self.form.output, batch.num_tokens)
        if out is None:
            out = inputs[0].new_empty(shape, dtype=self._dtype)
        elif out.shape != shape or out.dtype is not self._dtype or not out.is_contiguous():
            raise _bad_input("out", out, shape, self._dtype)
        wanted = self.state_spec(states.num_slots)
        if (
            states.data.shape[1:] != wanted.shape
            or states.data.dtype is not STORAGE_DTYPES[wanted.dtype]
        ):
            raise _bad_input(
                "states", states.data, ("slots", *wanted.shape), STORAGE_DTYPES[wanted.dtype]
            )
        if runtime.checks and not capturing(out):
            check_state_slots(batch, states.num_slots)
        runtime.forward(named, self.params, states.data, out)
        return out

    def _named(self, inputs: tuple[Tensor, ...], tokens: int) -> dict[str, Tensor]:
        form, spec = self.form, self.selection.spec
        if len(inputs) != len(form.inputs):
            raise BatchError(
                f"{spec.kind.value} takes {', '.join(form.inputs)}; {len(inputs)} tensors were given"
            )
        named = dict(zip(form.inputs, inputs, strict=True))
        for name, tensor in named.items():
            shape = shape_of(spec, form.inputs[name], tokens)
            fits = tensor.dtype is self._dtype or (name in GATES and tensor.dtype is torch.float32)
            if tensor.shape != shape or not fits:
                raise _bad_input(name, tensor, shape, self._dtype)
        return named

    def extra_repr(self) -> str:
        """Describe the layer in `print(model)`."""
        return f"{self.selection.spec}; {self.selection.decision.summary()}"


def _bad_input(
    name: str, tensor: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype
) -> BatchError:
    return BatchError(
        f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; it must be "
        f"({', '.join(map(str, shape))}) of {dtype}"
    )
