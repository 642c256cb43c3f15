"""What happens at `pip install`? The native kernels are compiled, where there is a compiler."""

from __future__ import annotations

import importlib.util
import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "src" / "polyattn_cpu" / "native"


class NativeBuildHook(BuildHookInterface):
    """Wheels and editable installs get the library, or a report of why there is none.

    Without a compiler the install succeeds, and `polyattn doctor` says what is missing.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        found = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
        assert found is not None and found.loader is not None
        build = importlib.util.module_from_spec(found)
        found.loader.exec_module(build)
        if not build.build_or_say():
            build_data["artifacts"].append("src/polyattn_cpu/native/build.txt")
            return
        build_data["artifacts"] += [
            "src/polyattn_cpu/native/build.txt", "src/polyattn_cpu/native/kernels.lib"
        ]  # fmt: skip
        build_data["pure_python"] = False
        # A universal2 Python's compiler makes a library for this machine's processor alone.
        target = sysconfig.get_platform().replace("universal2", platform.machine())
        build_data["tag"] = f"py3-none-{target.replace('-', '_').replace('.', '_')}"
