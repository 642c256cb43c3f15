"""How does a test run Python in a process of its own? By a fork of one that has torch and pytest.

Importing torch takes two seconds of a processor, pytest a quarter of one, and
tests start more than a hundred such processes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

OLDER_EMITTERS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""XLA compiles interpreted kernels with these in two thirds of the time.

`libtpu` ends a process whose `XLA_FLAGS` has the first, so no process that compiles for TPUs has it.
"""


def python(
    *words: str | Path,
    seconds: float = 300,
    cwd: str | Path = "",
    traces: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run what `python *words` runs, with variables beside the environment's; returns what it prints.

    `words` begin with a script, `-m` or `-c`. What Python, OpenMP or torch read when they start, they
    read of this process' environment. `traces`: the process has what traces a format's rows, two seconds
    of a processor; Triton is imported, so that its interpreter can't be asked for.
    """
    first, *rest = map(str, words)
    environ = {**os.environ, **variables}
    if "PALLAS_INTERPRET" in environ:
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {OLDER_EMITTERS}"
    traces &= "TRITON_INTERPRET" not in environ
    server, cwd = _server(traces), str(Path(cwd).resolve())
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "cwd": cwd, "environ": environ, "words": [first, *rest],
            "here": cwd if first in ("-m", "-c") else str(Path(first).parent),
            "files": [str(Path(folder) / name) for name in ("out", "err")],
        }  # fmt: skip
        if first == "-c":  # a file, from which inspect reads it
            asked["words"] = [str(Path(folder) / "code.py"), *rest[1:]]
            (Path(folder) / "code.py").write_text(rest[0])
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = int(server.stdout.readline())
        late = not select.select([server.stdout], [], [], seconds)[0]
        if late:
            os.kill(pid, signal.SIGKILL)
        code = int(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    if late:
        raise subprocess.TimeoutExpired([first, *rest], seconds, out, err)
    return subprocess.CompletedProcess([first, *rest], code, out, err)


@cache
def _server(traces: bool) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        [sys.executable, __file__, *["traces"] * traces], env={**os.environ, "PYTHONPATH": ""}, bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    atexit.register(server.communicate)  # which ends it
    return server


def _serve() -> None:
    """Fork for each line that asks, and write the child's number and exit code."""
    import pytest
    import torch

    assert pytest.__version__ and torch.__version__
    if sys.argv[1:]:
        importlib.import_module("torch._inductor")
    assert "polyattn" not in sys.modules
    gc.freeze()  # children's collections needn't look at these modules' objects
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(**json.loads(line))
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(
    words: list[str], here: str, files: list[str], cwd: str, environ: dict[str, str]
) -> None:
    for at, name in enumerate((os.devnull, *files)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), at)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    of_path = filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [here, *of_path, *sys.path[1:]]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
