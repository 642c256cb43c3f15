"""Builds, signs and tries a release; docs/release.md says in which order.

    python .ci/release.py check            # versions, bounds and the changelog agree
    python .ci/release.py build            # every wheel, into build/release/
    python .ci/release.py sign KEY         # the checksums, and an SSH key's signature of them
    python .ci/release.py try              # verify, install into a fresh environment, serve a trace
    python .ci/release.py rehearse         # all of it, with a key that is thrown away

Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "release"
SIGNER = "release@polyattn"
NAMESPACE = "polyattn-release"


def projects() -> dict[str, dict[str, Any]]:
    """Return each distribution's `project` table by its folder, in the order of the uploads.

    Core comes last: its extras name the others, so whoever installs it finds them.
    """
    folders = [*ROOT.glob("plugins/*"), *ROOT.glob("integrations/*"), ROOT / "core"]
    return {
        path.relative_to(ROOT).as_posix(): tomllib.loads(
            (path / "pyproject.toml").read_text(encoding="utf-8")
        )["project"]
        for path in sorted(folders, key=lambda p: (p.name == "core", p))
        if (path / "pyproject.toml").exists()
    }


def version() -> str:
    """Return the one version of all distributions."""
    text = (ROOT / "core/src/polyattn/_version.py").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    assert found is not None
    return found[1]


def problems() -> Iterator[str]:
    """Yield what keeps this tree from being released as its version, with the remedy."""
    now, declared = version(), projects()
    ours = {project["name"] for project in declared.values()}
    for folder, project in declared.items():
        where = f"{folder}/pyproject.toml"
        if project.get("dynamic") != ["version"]:
            yield f"{where}: take the version from core/src/polyattn/_version.py (dynamic)"
        extras = project.get("optional-dependencies", {})
        for text in [*project.get("dependencies", ()), *(t for e in extras.values() for t in e)]:
            requirement = Requirement(text)
            name, bounds = requirement.name, requirement.specifier
            if name not in ours:
                if name.startswith("polyattn"):
                    yield f"{where}: {text!r} is no distribution of this tree"
            elif name != project["name"] and not {">=", "<"} <= {s.operator for s in bounds}:
                yield f"{where}: {text!r} needs both bounds, as in '{name}>=0.1,<0.2'"
            elif not bounds.contains(now):
                yield f"{where}: {text!r} excludes {now}; widen it"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {now} " not in changes:
        yield f"CHANGELOG.md: has no section '## {now} (date)'"
    if len(re.findall(r"^- ", changes.partition("\n## ")[2], re.MULTILINE)) > 10:
        yield "CHANGELOG.md: the newest section has more than ten lines; join what belongs together"


def build() -> None:
    """Build every wheel into an empty folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    folders = [str(ROOT / folder) for folder in projects()]
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--wheel-dir",
        str(FOLDER),
        *folders,
    )
    wheels = sorted(FOLDER.glob("*.whl"))
    assert len(wheels) == len(folders), "one wheel for each distribution"
    assert all(f"-{version()}-" in wheel.name for wheel in wheels), "one version"
    run(sys.executable, "-m", "twine", "check", "--strict", *(str(wheel) for wheel in wheels))


def sign(key: Path) -> None:
    """Write the wheels' checksums, sign them by a key of ssh-keygen's, and say who may sign."""
    wheels = sorted(FOLDER.glob("*.whl"))
    sums = (f"{hashlib.sha256(w.read_bytes()).hexdigest()}  {w.name}\n" for w in wheels)
    (FOLDER / "SHA256SUMS").write_text("".join(sums))
    (FOLDER / "SHA256SUMS.sig").unlink(missing_ok=True)
    run("ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(FOLDER / "SHA256SUMS"))
    public = key.with_name(f"{key.name}.pub").read_text().split()
    (FOLDER / "allowed_signers").write_text(f"{SIGNER} {public[0]} {public[1]}\n")


def attempt() -> None:
    """Verify what was built as a user does, install it, and run the main job."""
    sums = FOLDER / "SHA256SUMS"
    with sums.open() as text:
        command = ["ssh-keygen", "-Y", "verify", "-f", "allowed_signers", "-I", SIGNER, "-n",
                   NAMESPACE, "-s", "SHA256SUMS.sig"]  # fmt: skip
        subprocess.run(command, stdin=text, cwd=FOLDER, check=True)
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=FOLDER)
    environment = ROOT / "build" / "release-try"
    venv.create(environment, clear=True, with_pip=True)
    programs = environment / "bin"
    run(str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"),
        "--find-links", str(FOLDER), f"polyattn[cpu]=={version()}")  # fmt: skip
    run(str(programs / "polyattn"), "doctor", cwd=FOLDER)
    run(str(programs / "polyattn"), "run", cwd=FOLDER)


def rehearse() -> None:
    """Do everything but the upload, with a key that is thrown away."""
    build()
    key = FOLDER / "throwaway"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", SIGNER, "-f", str(key))
    sign(key)
    key.unlink()
    attempt()


def run(*command: str, cwd: Path = ROOT) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, cwd=cwd, check=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=("check", "build", "sign", "try", "rehearse"))
    parser.add_argument("key", type=Path, nargs="?")
    arguments = parser.parse_args()
    if (arguments.step == "sign") != (arguments.key is not None):
        parser.error("sign KEY needs a private key's file; the other steps take none")
    wrong = list(problems())
    print(*wrong or [f"{version()}: versions, bounds and changelog agree"], sep="\n")
    if wrong:
        return 1
    if arguments.step == "sign":
        sign(arguments.key)
    elif arguments.step != "check":
        {"build": build, "try": attempt, "rehearse": rehearse}[arguments.step]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
