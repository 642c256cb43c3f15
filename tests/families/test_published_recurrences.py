"""Do the recurrences agree with what others publish: transformers' modules, the papers' other forms?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from polyattn import (
    AttentionVariant,
    Batch,
    LayerSpec,
    Recurrent,
    register_variant,
    select,
    unregister_variant,
)
from polyattn.errors import SpecError
from polyattn.families.recurrent import reference
from polyattn.families.recurrent.workload import recurrent_inputs, recurrent_params
from polyattn.kernel import RecurrentSpec, untraceable
from polyattn.spec.recurrence import form_of
from torch import Tensor

TOKENS, BEFORE = 50, 21
LENS = ([TOKENS], [TOKENS])


def given(spec: LayerSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)
    inputs = recurrent_inputs(spec, TOKENS, generator)
    named = dict(zip(form_of(spec).inputs, inputs, strict=True))
    return named, recurrent_params(spec, generator)


def expected(spec: LayerSpec, inputs: dict[str, Tensor], params: dict[str, Tensor]) -> Tensor:
    """Return the reference's output for one fresh sequence."""
    shape = (spec.num_heads, spec.head_size, spec.v_head_size)
    state = torch.zeros(shape if spec.head_size > 1 else shape[:1], dtype=torch.float64)
    if spec.kind == "phi_linear":
        state = torch.zeros(*shape[:2], shape[2] + 1, dtype=torch.float64)
    double = {name: tensor.double() for name, tensor in inputs.items()}
    params = {name: tensor.double() for name, tensor in params.items()}
    out, _ = reference.scan(spec, double, params, state, before=0)
    return out


def layer_output(
    spec: LayerSpec, inputs: dict[str, Tensor], params: dict[str, Tensor], steps: list[int]
) -> Tensor:
    """Return what the selected backend gives, in steps of so many tokens."""
    layer = Recurrent(spec, **params)
    states = layer.group.allocate_states(1)
    states.data.fill_(torch.nan)
    out, at = [], 0
    for count in steps:
        batch = Batch.from_lens([count], [at + count], state_slots=torch.tensor([0]))
        part = [tensor[at : at + count] for tensor in inputs.values()]
        out.append(layer(*part, states=states, plan=batch))
        at += count
    return torch.cat(out)


def agree(spec: LayerSpec, inputs: Any, params: Any, theirs: Tensor) -> None:
    torch.testing.assert_close(expected(spec, inputs, params), theirs.double(), rtol=0, atol=1e-5)
    for steps in ([TOKENS], [BEFORE, 1, TOKENS - BEFORE - 1], [1] * TOKENS):
        ours = layer_output(spec, inputs, params, steps)
        torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=2e-5)


def test_kda_is_transformers_kimi_delta_attention() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    spec = LayerSpec(
        kind="kda",
        num_heads=3,
        head_size=32,
        dtype="float32",
        recurrent=RecurrentSpec(qk_norm=True),
    )
    inputs, params = given(spec)
    # A length that norming must undo.
    inputs["q"], inputs["k"] = inputs["q"] * 3.0, inputs["k"] * 0.2
    batched = [inputs[name][None] for name in ("q", "k", "v", "g", "beta")]
    for function in (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention):
        out, _ = function(
            *batched, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
        )
        agree(spec, inputs, params, out[0])


def test_mamba1_of_several_heads_is_transformers_zamba() -> None:
    """Each of the mixer's heads has a B and a C of its own: channel groups, with a gate."""
    zamba = pytest.importorskip("transformers.models.zamba.modeling_zamba")
    config = zamba.ZambaConfig(
        hidden_size=12, mamba_expand=2, n_mamba_heads=3, mamba_d_state=5, mamba_dt_rank=4,
        num_hidden_layers=4, use_associative_scan=False,
    )  # fmt: skip
    mixer = zamba.ZambaMambaMixer(config, 0).double()
    for name, weight in mixer.named_parameters():
        if name != "A_log":
            torch.nn.init.normal_(weight, std=0.3)
    hidden = torch.randn(1, TOKENS, 12, dtype=torch.float64)
    with torch.no_grad():
        theirs = mixer(hidden)[0]
        x, z = mixer.in_proj(hidden)[0].view(TOKENS, 24, 2).unbind(-1)
        x = torch.nn.functional.silu(mixer.conv1d(x.T)[:, :TOKENS]).T
        of_head = torch.einsum("hri,thi->thr", mixer.x_proj_weight, x.unflatten(1, (3, 8)))
        step, b, c = of_head.split([4, 5, 5], -1)
        dt = torch.einsum("hir,thr->thi", mixer.dt_proj_weight, step).flatten(1)
        inputs = {"x": x, "dt": dt, "B": b, "C": c, "z": z}
        params = {
            "A": -mixer.A_log.exp().flatten(0, 1), "D": mixer.D.flatten(),
            "dt_bias": mixer.dt_proj_bias.flatten(),
        }  # fmt: skip
        spec = LayerSpec(
            kind="mamba1", num_heads=24, head_size=1, dtype="float32",
            recurrent=RecurrentSpec(state_size=5, channel_groups=3, gated=True),
        )  # fmt: skip
        state = torch.zeros(24, 5, dtype=torch.float64)
        out, _ = reference.scan(spec, inputs, params, state, before=0)
        torch.testing.assert_close(mixer.out_proj(out), theirs, rtol=1e-6, atol=1e-6)
        single = {name: tensor.float().contiguous() for name, tensor in inputs.items()}
        plain = {name: tensor.float() for name, tensor in params.items()}
        for steps in ([TOKENS], [BEFORE, 1, TOKENS - BEFORE - 1]):
            ours = layer_output(spec, single, plain, steps)
            torch.testing.assert_close(mixer.out_proj(ours.double()), theirs, rtol=1e-5, atol=1e-5)


def test_rg_lru_is_transformers_recurrent_gemma() -> None:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    heads, width = 3, 24
    module = RecurrentGemmaRglru(RecurrentGemmaConfig(num_attention_heads=heads, lru_width=width))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    spec = LayerSpec(
        kind="rg_lru", num_heads=width, head_size=1, dtype="float32", recurrent=RecurrentSpec()
    )
    x = torch.randn(TOKENS, width)

    def gate(name: str) -> Tensor:
        weight, bias = (getattr(module, f"{name}_{part}") for part in ("weight", "bias"))
        blocks = x.view(TOKENS, heads, -1)
        return (torch.einsum("thi,hij->thj", blocks, weight) + bias).flatten(1).detach()

    inputs = {
        "x": x, "input_gate": gate("input_gate"), "recurrent_gate": gate("recurrent_gate"),
    }  # fmt: skip
    theirs = module(x[None], torch.arange(TOKENS)[None])[0].detach()
    agree(spec, inputs, {"Lambda": module.recurrent_param.detach()}, theirs)


@pytest.mark.parametrize("version", [5, 6])
def test_rwkv_5_and_6_are_the_papers_sums(version: int) -> None:
    """wkv_t = diag(u) k_t' v_t + sum_i diag(w_{i+1} .. w_{t-1}) k_i' v_i (Peng et al., 2024).

    RWKV-5's w is the same for all tokens.
    """
    spec = LayerSpec(
        kind="rwkv6", num_heads=2, head_size=16, scale=1.0, dtype="float32",
        recurrent=RecurrentSpec(),
    )  # fmt: skip
    inputs, params = given(spec)
    if version == 5:
        inputs["w"] = inputs["w"][:1].expand(TOKENS, -1, -1)
    r, w, k, v = (inputs[name].double() for name in "rwkv")
    theirs = torch.zeros(TOKENS, 2, 16, dtype=torch.float64)
    for t in range(TOKENS):
        wkv = params["u"].double()[..., None] * k[t][..., None] * v[t][:, None]
        for i in range(t):
            decay = w[i + 1 : t].exp().prod(0)
            wkv += (decay * k[i])[..., None] * v[i][:, None]
        theirs[t] = torch.einsum("hk,hkv->hv", r[t], wkv)
    agree(spec, inputs, params, theirs)


def test_rwkv7_is_the_papers_matrix_form() -> None:
    """S = S (diag(w) - kappa' (a * kappa)) + v' k, y = r S' (Peng et al., 2025, equations 15-17)."""
    spec = LayerSpec(
        kind="rwkv7", num_heads=2, head_size=16, scale=1.0, dtype="float32",
        recurrent=RecurrentSpec(),
    )  # fmt: skip
    inputs, params = given(spec)
    r, w, k, v, a, b = (inputs[name].double() for name in "rwkvab")
    theirs = torch.zeros(TOKENS, 2, 16, dtype=torch.float64)
    for head in range(2):
        state = torch.zeros(16, 16, dtype=torch.float64)
        for t in range(TOKENS):
            transition = torch.diag(w[t, head].exp()) + torch.outer(a[t, head], b[t, head])
            state = state @ transition + torch.outer(v[t, head], k[t, head])
            theirs[t, head] = state @ r[t, head]
    agree(spec, inputs, params, theirs)


def squared(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, 0.25 * x * x)


@pytest.fixture
def variant() -> Iterator[str]:
    register_variant(AttentionVariant(name="squared", feature_mod=squared))
    yield "squared"
    unregister_variant("squared")


@pytest.mark.parametrize("feature_map", ["elu+1", "relu", None])
def test_linear_attention_with_a_normaliser_is_its_quadratic_form(
    feature_map: str | None, variant: str
) -> None:
    """Every pair of query and key: Katharopoulos et al. (2020), equation 5, causal, and the 1e-6 that
    their code adds to the sum of weights.
    """
    spec = LayerSpec(
        kind="phi_linear", num_heads=4, num_kv_heads=2, head_size=16, v_head_size=8, dtype="float32",
        recurrent=RecurrentSpec(feature_map=feature_map), variant=None if feature_map else variant,
    )  # fmt: skip
    inputs, params = given(spec)
    maps = {"elu+1": lambda t: torch.nn.functional.elu(t) + 1, "relu": torch.relu, None: squared}
    phi = maps[feature_map]
    q, k = (phi(inputs[name].double()).repeat_interleave(2, 1) for name in "qk")
    weights = torch.einsum("ihk,jhk->hij", q, k).tril()
    values = torch.einsum("hij,jhv->ihv", weights, inputs["v"].double())
    theirs = values / (weights.sum(-1).T[..., None] + 1e-6)
    agree(spec, inputs, params, theirs)


def test_a_map_of_features_is_a_function_of_one_head(variant: str) -> None:
    """It takes one argument and no input, stands alone, and is linear attention's."""
    spec = LayerSpec(
        kind="phi_linear", num_heads=2, head_size=8, variant=variant, recurrent=RecurrentSpec()
    )
    assert select(spec, "cpu").decision.prefill == "TORCH_SCAN"
    with pytest.raises(SpecError, match="feature_mod takes 2 arguments; it must take x"):
        AttentionVariant(name="two", feature_mod=lambda x, d: x)
    with pytest.raises(SpecError, match="feature_mod is for linear attention, and inputs for att"):
        AttentionVariant(name="two", feature_mod=lambda x, *, g: x, inputs={"g": "float32"})
    with pytest.raises(SpecError, match="and score_mod for attention"):
        AttentionVariant(name="two", feature_mod=squared, score_mod=lambda s, *_: s)
    with pytest.raises(SpecError, match="feature_mod gives one head of one token other results"):
        register_variant(AttentionVariant(name="two", feature_mod=lambda x: x - x.mean(0)))
    with pytest.raises(SpecError, match="'attention' and variant='squared' don't go together"):
        select(LayerSpec(num_heads=2, head_size=8, variant=variant), "cpu")
    with pytest.raises(SpecError, match="'phi_linear' and variant='flash_sigmoid' don't go tog"):
        select(spec.replace(variant="flash_sigmoid"), "cpu")


def test_what_triton_cant_generate_it_refuses_by_name() -> None:
    """A softmax over a head's elements (Hedgehog's, for one) is torch's to compute."""
    problem = untraceable(
        AttentionVariant(name="soft", feature_mod=lambda x: torch.softmax(x, -1)), "Triton"
    )
    assert problem == "operation 'softmax', which isn't generated for Triton"
    gain = torch.tensor(2.0)
    problem = untraceable(AttentionVariant(name="gained", feature_mod=lambda x: x * gain), "Triton")
    assert problem is not None and "a tensor" in problem


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "phi_linear"}, "takes one of elu+1, relu, or a variant with a feature_mod"),
        (
            {
                "kind": "phi_linear",
                "variant": "squared",
                "recurrent": RecurrentSpec(feature_map="relu"),
            },
            "feature_map='relu' beside variant='squared' don't go together",
        ),
        ({"kind": "gdn", "variant": "squared"}, "variant='squared' is for attention"),
        (
            {"kind": "gdn", "recurrent": RecurrentSpec(feature_map="relu")},
            "no other kind takes any",
        ),
        ({"kind": "rwkv7", "num_kv_heads": 2}, "num_kv_heads=2: rwkv7 has no groups"),
        ({"kind": "rg_lru", "num_kv_heads": 1}, "num_kv_heads=1: rg_lru has no groups"),
    ],
)
def test_what_doesnt_go_together_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as error:
        LayerSpec(**({"num_heads": 4, "head_size": 16, "recurrent": RecurrentSpec()} | fields))
    assert says in str(error.value)
    with pytest.raises(SpecError, match="is unknown; did you mean .relu."):
        RecurrentSpec(feature_map="gelu")
