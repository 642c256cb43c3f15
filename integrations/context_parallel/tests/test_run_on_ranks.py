"""`polyattn run --context-parallel`: two processes serve as one does, checked against float64."""

from __future__ import annotations

import json
import sys

import pytest
from forks import python
from polyattn import Device
from polyattn.errors import SettingsError
from polyattn.tools.cli.launch import check_launch, joined

SERVE = ["run", "gpt-oss-20b", "--requests=4", "--scale=0.2", "--max-tokens=4", "--cache-gb=0.2",
         "--token-budget=256", "--json"]  # fmt: skip


def report(command: list[str]) -> dict[str, object]:
    ran = python("-m", *command)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
def test_two_ranks_serve_what_one_serves() -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "polyattn"]
    two = report([*launch, *SERVE, "--context-parallel=2"])
    one = report(["polyattn", *SERVE])
    for name in ("steps", "tokens", "generated_tokens", "requests", "checked_tokens"):
        assert two[name] == one[name], name
    assert two["context_parallel"] == 2 and 0 < two["max_error"] < 1.5e-2  # type: ignore[operator]
    assert isinstance(two["steps"], int) and two["steps"] > 4, "prompts come in several chunks"


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        SettingsError, match="needs 2 processes and there are 1; start them with torchrun"
    ):
        check_launch(2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SettingsError, match="there are 4"):
        check_launch(2)
    check_launch(4)


def test_without_the_extension_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("polyattn_context_parallel")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polyattn_context_parallel", None)
    with pytest.raises(SettingsError, match=r'pip install "polyattn\[context-parallel\]"'):
        joined(2, Device("cpu", "x86_64", torch_device="cpu"))
