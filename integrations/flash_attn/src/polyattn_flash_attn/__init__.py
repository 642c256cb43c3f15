"""flash-attn's functions on polyattn: any device, any backend that polyattn has.

    import polyattn_flash_attn
    polyattn_flash_attn.install()            # `import flash_attn` and `import flash_attn_interface` now
    from flash_attn import flash_attn_func

Importing this package installs nothing. `install` hides a real flash-attn only on request.
"""

from __future__ import annotations

from polyattn.host import StandIns

from polyattn_flash_attn import bert_padding, flash_attn_2, flash_attn_3

VERSIONS = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0"}
"""The version whose signatures the functions have."""

_stand_ins = StandIns(
    {
        "flash_attn": flash_attn_2,
        "flash_attn.flash_attn_interface": flash_attn_2,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn_interface": flash_attn_3,
    },
    VERSIONS,
    ("flash-attn", "flash-attn-3"),
)
install, uninstall = _stand_ins.install, _stand_ins.uninstall

__all__ = ["VERSIONS", "install", "uninstall"]
