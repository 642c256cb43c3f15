"""Builds the zoo: one real distribution for each way that a plugin can be broken.

Each animal is a module and its metadata in a wheel; pip installs them into a scratch folder.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

HEAD = """
from polyattn.plugin import BackendInfo, Capabilities, Platform, hookimpl

@hookimpl
def polyattn_api_versions():
    return (1, 1)

def info(name, **more):
    more.setdefault("path", "polyattn_cpu.sdpa:TorchSDPA")
    caps = Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"}))
    return BackendInfo(name=name, summary="a zoo animal", capabilities=caps, **more)
"""


def backends(code: str) -> str:
    return f"{HEAD}\n@hookimpl\ndef polyattn_backends():\n    return {code}\n"


def platform(name: str) -> str:
    return f"""{HEAD}
@hookimpl
def polyattn_platforms():
    return [Platform(name={name!r}, detect="nowhere:detect")]
"""


ANIMALS: dict[str, tuple[str, str]] = {
    # name -> (the module's source, words that list and doctor must say of it)
    "import-error": ("import a_vendor_library_that_is_absent\n", "ModuleNotFoundError"),
    "syntax-error": ("def broken(:\n", "SyntaxError"),
    "system-exit": ("import sys\nsys.exit(3)\n", "SystemExit"),
    "wrong-api": (HEAD.replace("(1, 1)", "(7, 9)"), "needs API version 7 to 9"),
    "no-api": ("x = 1\n", "does not implement polyattn_api_versions"),
    "hook-raises": (backends("1 / 0"), "ZeroDivisionError"),
    "hook-junk": (backends("['junk']"), "'junk'"),
    "hook-junk-type": (backends("42"), "42"),
    "bad-hook-argument": (
        HEAD + "\n@hookimpl\ndef polyattn_backends(surprise):\n    return []\n",
        "surprise",
    ),
    "duplicate-a": (backends("[info('TWICE')]"), "'TWICE' is claimed by"),
    "duplicate-b": (backends("[info('TWICE')]"), "duplicate-b"),
    "platform-a": (platform("fakechip"), "'fakechip' is claimed by"),
    "platform-b": (platform("fakechip"), "platform-b"),
    "contradiction": (
        HEAD + "\nCAPS = Capabilities(platforms={'cpu': ()}, phases=frozenset({'mixed'}))\n",
        "'mixed' needs both",
    ),
    "missing-class": (
        backends("[info('GHOST', path='polyattn_cpu.sdpa:Ghost')]"),
        "has no 'Ghost'",
    ),
    "missing-module": (backends("[info('NOWHERE', path='zoo_nowhere:X')]"), "zoo_nowhere"),
    "no-vendor-library": (
        backends("[info('NEEDY', requires=('zoo-vendor-lib>=2',), install='pip install zoo')]"),
        "zoo-vendor-lib is not installed",
    ),
    "hanging-probe": (
        backends("[info('SLEEPY', probe='zoo_hanging_probe:probe')]")
        + "\ndef probe():\n    import time\n    time.sleep(60)\n",
        "did not answer within",
    ),
    "raising-probe": (
        backends("[info('GRUMPY', probe='zoo_raising_probe:probe')]")
        + "\ndef probe():\n    raise RuntimeError('no chip')\n",
        "no chip",
    ),
    "healthy": (backends("[info('HEALTHY')]"), "HEALTHY"),
}


def module_of(name: str) -> str:
    return "zoo_" + name.replace("-", "_")


def build(folder: Path) -> Path:
    """Build every animal as a wheel, install them all into a folder, and return that folder."""
    wheels = [write_wheel(folder, name, dedent(source)) for name, (source, _) in ANIMALS.items()]
    scratch = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(scratch), *map(str, wheels)], check=True)
    corrupt(scratch)
    return scratch


def write_wheel(folder: Path, name: str, source: str) -> Path:
    dist = f"zoo_{name.replace('-', '_')}"
    info = f"{dist}-1.2.dist-info"
    files = {
        f"{module_of(name)}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: zoo-{name}\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: zoo\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[polyattn.plugins]\n{name} = {module_of(name)}\n",
    }
    path = folder / f"{dist}-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return path


def corrupt(scratch: Path) -> None:
    """Damage one installed distribution's metadata, as a crashed installation would."""
    folder = scratch / "zoo_corrupt-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(b"\xff\xfe\x00garbage")
    (folder / "entry_points.txt").write_text("[polyattn.plugins]\ncorrupt = zoo_corrupt\n")
