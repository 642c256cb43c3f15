"""causal-conv1d's, mamba-ssm's and flash-linear-attention's functions on polyattn, for inference.

    import polyattn_recurrent
    polyattn_recurrent.install()            # before the model's file is imported
    from transformers import Mamba2ForCausalLM

transformers finds them by plain import, when a model's file is imported. Forward only: a call that
asks for gradients raises. Nothing is installed by importing this package.
"""

from __future__ import annotations

from polyattn.host import StandIns

from polyattn_recurrent import causal_conv1d, gated_delta_rule, mamba1, mamba2, mamba_state

VERSIONS = {"causal_conv1d": "1.7.0", "mamba_ssm": "2.3.2", "fla": "0.6.0"}
"""Whose signatures the functions have."""

_stand_ins = StandIns(
    {
        "causal_conv1d": causal_conv1d,
        "causal_conv1d.causal_conv1d_interface": causal_conv1d,
        "mamba_ssm": None,
        "mamba_ssm.ops": None,
        "mamba_ssm.ops.selective_scan_interface": mamba1,
        "mamba_ssm.ops.triton": None,
        "mamba_ssm.ops.triton.ssd_combined": mamba2,
        "mamba_ssm.ops.triton.selective_state_update": mamba_state,
        "fla": None,
        "fla.ops": None,
        "fla.ops.gated_delta_rule": gated_delta_rule,
    },
    VERSIONS,
    ("causal-conv1d", "mamba-ssm", "flash-linear-attention"),
)
install, uninstall = _stand_ins.install, _stand_ins.uninstall

__all__ = ["VERSIONS", "install", "uninstall"]
