"""FlashInfer's attention wrappers on polyattn: any device, any backend that polyattn has.

    import polyattn_flashinfer
    polyattn_flashinfer.install()            # `import flashinfer` now
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

Importing this package installs nothing. `install` hides a real FlashInfer only on request.
"""

from __future__ import annotations

from polyattn.host import StandIns

from polyattn_flashinfer import cascade, decode, flashinfer, mla, page, prefill

VERSIONS = {"flashinfer": "0.6.18"}
"""The version whose signatures the functions have."""

_stand_ins = StandIns(
    {
        "flashinfer": flashinfer,
        "flashinfer.cascade": cascade,
        "flashinfer.decode": decode,
        "flashinfer.mla": mla,
        "flashinfer.page": page,
        "flashinfer.prefill": prefill,
    },
    VERSIONS,
    ("flashinfer-python",),
)
install, uninstall = _stand_ins.install, _stand_ins.uninstall

__all__ = ["VERSIONS", "install", "uninstall"]
