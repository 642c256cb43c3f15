"""Are mamba_ssm's configs read as transformers' conversion of those checkpoints reads them?"""

from __future__ import annotations

from typing import Any

import pytest
from polyattn.errors import ConfigError
from polyattn.tools.cli.models import bundled
from polyattn_models import layer_specs
from polyattn_models.config import read_values
from tiny import CONFIG_MAPPING

MODEL = {"d_model": 64, "n_layer": 3, "vocab_size": 50277, "pad_vocab_size_multiple": 8}


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        layer_specs(values)
    return str(caught.value)


def test_the_published_file_is_what_its_conversion_makes() -> None:
    """Every field of transformers' class that the translation sets, from sizes it derives itself."""
    values, _ = read_values(bundled("models", "mamba2-2.7b.json"))
    # `convert_ssm_config_to_hf_config` sets these; all else is the class's own default.
    converted = CONFIG_MAPPING["mamba2"](
        hidden_size=2560, num_heads=2560 * 2 // 64, num_hidden_layers=64, n_groups=1,
        residual_in_fp32=True, tie_word_embeddings=True, vocab_size=50288,
    ).to_dict()  # fmt: skip
    ours = {name: converted.get(name) for name in values}
    ours["time_step_limit"] = list(ours["time_step_limit"])
    assert ours == values
    assert layer_specs(converted) == layer_specs(values)


def test_mamba1_and_fields_of_a_layer() -> None:
    values, _ = read_values(MODEL | {"ssm_cfg": {"d_state": 8, "dt_rank": 4, "dt_min": 0.01}})
    converted = CONFIG_MAPPING["mamba"](
        hidden_size=64, num_hidden_layers=3, state_size=8, time_step_rank=4, vocab_size=50280
    )
    assert values["model_type"] == "mamba" and values["vocab_size"] == 50280
    assert layer_specs(values | {"dtype": "float32"}) == layer_specs(
        converted.to_dict() | {"dtype": "float32"}
    )
    layer = {"layer": "Mamba2", "headdim": 32, "ngroups": 2, "d_state": 16, "d_conv": 3}
    spec = layer_specs(MODEL | {"ssm_cfg": layer})[0]
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (4, 2, 32)
    assert spec.recurrent is not None
    assert (spec.recurrent.state_size, spec.recurrent.conv_width) == (16, 3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer='Mamba3' is unknown"),
        ({"ssm_cfg": []}, "ssm_cfg=[] must be a JSON object"),
        ({"ssm_cfg": {"dstate": 8}}, "ssm_cfg.dstate=8 is unknown; did you mean 'd_state'"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "ssm_cfg.d_ssm=32 can't be served"),
        ({"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, "ssm_cfg.rmsnorm=False can't be"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 48}}, "doesn't divide expand x d_model = 128"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_limit": [0.1, 1.0]}}, "time_step_limit=[0.1, 1.0]"),
        ({"attn_layer_idx": [1]}, "attn_layer_idx=[1] can't be served; only [] is understood"),
        ({"d_intermediate": 128}, "d_intermediate=128 can't be served"),
        ({"d_modl": 64}, "d_modl=64 is unknown; did you mean 'd_model'"),
        ({"d_model": "64"}, "d_model='64' must be a positive integer"),
        ({"n_layer": 0}, "num_hidden_layers=0 must be a positive integer"),
    ],
)
def test_what_cant_be_served(changes: dict[str, Any], names: str) -> None:
    assert names in refused(MODEL | {"ssm_cfg": {}} | changes)
