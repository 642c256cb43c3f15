"""The quiet promises: what isn't imported, what the documents say, what the figures are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import polyattn
import pytest
from distributions import install

ROOT = Path(__file__).parent.parent


def python(code: str, *options: str, **env: str) -> str:
    found = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True, text=True, env={**os.environ, **env}, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


FLOATS = {"empty", "zeros", "ones", "eye", "rand", "randn", "linspace"}
"""torch's functions whose result has the default dtype, which is the caller's."""
PLACED = FLOATS | {"arange", "as_tensor", "full", "randint", "randperm", "tensor"}
"""Those whose result is on the default device."""


def calls() -> Iterator[tuple[Path, ast.Call]]:
    """Yield the calls of attributes in what serves."""
    for path in ROOT.glob("*/**/src/**/*.py"):
        if {"tools", "conformance"} & set(path.parts):
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                yield path, call


def test_no_tensor_is_on_the_callers_default_device() -> None:
    """VANILLA's and the example's were, and raised or masked nothing where an engine sets another."""
    bare = []
    for path, call in calls():
        assert isinstance(call.func, ast.Attribute)
        made = ast.unparse(call.func.value) == "torch" and call.func.attr in PLACED
        if path.name == "coupling.py":  # within a device
            continue
        if made and not {"device", None} & {word.arg for word in call.keywords}:
            bare.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not bare


def test_no_tensor_has_the_callers_default_dtype() -> None:
    """Triton's parts of split decodes had: of bfloat16 where an engine sets that."""
    bare = []
    for path, call in calls():
        assert isinstance(call.func, ast.Attribute)
        by_name = {word.arg: word.value for word in call.keywords}
        floats = [
            n for n in ast.walk(call) if isinstance(n, ast.Constant) and type(n.value) is float
        ]
        made = ast.unparse(call.func.value) == "torch" and (
            call.func.attr in FLOATS or (call.func.attr in ("full", "tensor") and floats)
        )
        if made and "dtype" not in by_name and None not in by_name:
            bare.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not bare


def test_import_is_light() -> None:
    code = (
        "import polyattn, sys; print([m for m in sys.modules if m.startswith(('torch', 'poly'))])"
    )
    loaded = python(code, "-Werror")
    assert "torch" not in loaded and "polyattn_cpu" not in loaded


@pytest.mark.parametrize("args", ["['polyattn', 'list']", "['polyattn', 'list', '--json']"])
def test_list_imports_no_torch(args: str) -> None:
    code = f"import sys; sys.argv = {args}; from polyattn.tools.cli.entry import main; main()\n"
    code += "print('torch' in sys.modules, 'polyattn_cpu.sdpa' in sys.modules)"
    assert python(code).endswith("False False")


def test_selection_imports_no_torch() -> None:
    code = "import polyattn, sys\nspec = polyattn.LayerSpec(num_heads=4, head_size=64)\n"
    code += "polyattn.select(spec, 'x86-amx'); print('torch' in sys.modules)"
    assert python(code) == "False"


def test_attention_imports_no_compiler() -> None:
    code = "import polyattn, sys\nspec = polyattn.LayerSpec(num_heads=4, head_size=64)\n"
    code += "polyattn.Attention(polyattn.select(spec, 'cpu'))\n"
    code += "print('torch._inductor' in sys.modules, 'polyattn_cpu.flex' in sys.modules)"
    assert python(code) == "False False"


def test_a_disabled_plugin_is_never_imported() -> None:
    code = "import polyattn, sys; polyattn.discover(); print('polyattn_cpu' in sys.modules)"
    assert python(code, POLYATTN_DISABLE_PLUGINS="cpu") == "False"
    assert python(code, POLYATTN_PLUGINS="example") == "False"
    assert python(code) == "True"


def test_vendors_adapters_do_without_the_triton_plugin() -> None:
    """Storing is a role: CUDA's and ROCm's adapters import nobody else's kernels."""
    pytest.importorskip("triton")
    code = (
        "import importlib, pkgutil, sys, polyattn_cuda, polyattn_rocm\n"
        "for package in (polyattn_cuda, polyattn_rocm):\n"
        "    for found in pkgutil.iter_modules(package.__path__):\n"
        "        try: importlib.import_module(f'{package.__name__}.{found.name}')\n"
        "        except ImportError as error: assert 'polyattn' not in str(error), error\n"
        "print(any(name.startswith('polyattn_triton') for name in sys.modules))"
    )
    assert python(code, POLYATTN_DISABLE_PLUGINS="triton") == "False"


def test_three_hundred_distributions_do_not_slow_discovery(tmp_path: Path) -> None:
    for index in range(300):
        install(tmp_path, f"dist{index}", "1.0", points="[console_scripts]\nx = x:y\n")
    code = (
        "import time; from polyattn.registry.discovery import discover\nt = time.process_time()\n"
    )
    code += "n = len(discover().plugins); print(n, time.process_time() - t)"
    count, seconds = python(code, PYTHONPATH=str(tmp_path)).split()
    assert int(count) >= 2
    assert float(seconds) < 2.0  # 0.05 s where it was measured; this catches quadratic behaviour


def test_one_version_everywhere() -> None:
    from importlib.metadata import version

    names = ("polyattn", "polyattn-cpu", "polyattn-cuda", "polyattn-triton")
    assert {version(name) for name in names} == {polyattn.__version__}


DISTRIBUTIONS = sorted(
    path.parent
    for pattern in ("core", "plugins/*", "integrations/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
)


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_distributions_say_the_same_of_themselves(folder: Path) -> None:
    toml = tomllib.loads((folder / "pyproject.toml").read_text())
    of_core = tomllib.loads((ROOT / "core/pyproject.toml").read_text())
    # `.ci/run` builds all in one environment, after core in one of its own.
    assert toml["build-system"] == of_core["build-system"]
    project, core = toml["project"], of_core["project"]
    for field in (
        "license",
        "license-files",
        "readme",
        "authors",
        "requires-python",
        "classifiers",
    ):
        assert project[field] == core[field], field
    assert "attention" in project["keywords"] and project["dynamic"] == ["version"]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / "README.md").read_text().startswith(f"# {project['name']}\n")
    package = folder / "src" / project["name"].replace("-", "_")
    assert (package / "py.typed").exists()
    assert folder.name == "core" or "polyattn>=0.1,<0.2" in project["dependencies"]


def test_every_public_name_is_there() -> None:
    lines = (ROOT / "core/src/polyattn/__init__.pyi").read_text().splitlines()
    assert len(polyattn.__all__) == len(lines), "a line of the list that isn't read"
    for name in polyattn.__all__:
        assert getattr(polyattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atention'") as caught:
        polyattn.atention  # noqa: B018
    # For Python's suggestion.
    assert caught.value.name == "atention" and caught.value.obj is polyattn


def test_import_contracts() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; exit(lint_imports())"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout


def assert_uploadable(folder: Path) -> None:
    """Assert that `twine check` has nothing to say of a folder's wheels, a warning neither."""
    wheels = [str(wheel) for wheel in folder.glob("*.whl")]
    command = [sys.executable, "-m", "twine", "check", "--strict", *wheels]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wheels and checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == len(wheels), checked.stdout


def test_readme_has_its_two_commands() -> None:
    commands = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("python3 -m")
    ]
    assert len(commands) == 2
    assert commands[0].endswith("polyattn run") and "pytest" in commands[1]
