"""Does every variant compile for every TPU? libtpu's compiler says so, in pieces of bounded time.

    python benchmarks/tpu_compiled.py v5e --seconds 450

Layers of the bundled models and variants of `tests/plugins/tpu/test_tpu_compiled.py`, each phase, and
heads spread over several chips. Results are kept in results/tpu/compiled.json as they come, code bytes
or the compiler's error; the next call goes on with what is missing, and begins anew where the code is
another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks/results/tpu/compiled.json"
MODULES = ("kernel", "functions", "latent", "recurrence", "planning", "configs", "buckets")
DEVICES = {"v5e": (4, 8), "v5p": (4, 8), "v6e": (4, 8), "v7x": (8, 16)}
sys.path.insert(0, str(ROOT / "tests/plugins/tpu"))

import test_tpu_compiled as suite  # noqa: E402
import tpu_ahead  # noqa: E402


def digest() -> str:
    """Return what tells whether a result is of the code that is here."""
    folder = ROOT / "plugins/tpu/src/polyattn_tpu"
    files = [*(folder / f"{name}.py" for name in MODULES), Path(tpu_ahead.__file__)]
    whole = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(whole).hexdigest()[:16]


def programs(arch: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each program's name, and what compiles it."""
    for name, spec in suite.VARIANTS.items():
        for phase in ("decode",) if spec.kind.is_latent else ("prefill", "decode"):
            yield f"{name}, {phase}", lambda s=spec, p=phase: suite.compiled(s, arch, p)  # type: ignore[misc]
    for devices in DEVICES[arch]:
        for phase in ("prefill", "decode"):
            yield (
                f"heads over {devices} devices, {phase}",
                lambda n=devices, p=phase: tpu_ahead.compile_sharded(suite.SPREAD[n], arch, p, n),  # type: ignore[misc]
            )


def outcome(compile_it: Callable[[], Any]) -> Any:
    """Return a program's code bytes, or the compiler's error."""
    try:
        return compile_it().memory_analysis().generated_code_size_in_bytes
    except Exception as error:  # what a compiler refuses is a result
        return f"fails: {str(error).splitlines()[0][:160]}"


def main() -> int:
    """Compile a piece; 0 where all programs are there and none failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", choices=DEVICES)
    parser.add_argument("--seconds", type=float, default=1e9, help="end after the program at hand")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    kept = json.loads(OUT.read_text()).get(given.arch, {}) if OUT.exists() else {}
    found = kept["programs"] if kept.get("code") == digest() else {}
    wanted = dict(programs(given.arch))
    for name, compile_it in wanted.items():
        if time.monotonic() > until:
            break
        if not isinstance(found.get(name), int):
            found[name] = outcome(compile_it)
            print(name, found[name], flush=True)
    failed = [name for name, result in found.items() if not isinstance(result, int)]
    results = json.loads(OUT.read_text()) if OUT.exists() else {}  # others may have written
    results[given.arch] = {
        "command": f"python benchmarks/tpu_compiled.py {given.arch}",
        "date": str(date.today()),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "libtpu")},
        "code": digest(),
        "compiled": len(found) - len(failed),
        "failed": failed,
        "missing": [name for name in wanted if name not in found],
        "programs": found,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return 0 if len(found) == len(wanted) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
