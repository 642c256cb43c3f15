"""What tired operators type: one clear line and a proper exit code, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import polyattn
import pytest
from forks import python
from polyattn.tools.replay.trace import TraceError, read_trace
from tools.commands import command_lines, here, write_files

SMALL = '{"num_heads": 4, "head_size": 64, "dtype": "float32"}'
COMMAND = [sys.executable, "-m", "polyattn"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["explain", "llama-3.1-8b", "--spec", SMALL], "use one of them"),
        (["bench", "--model", "llama-3.1-8b", "--spec", SMALL], "use one of them"),
        (["bench", "2q1s64", "--backend", "NOPE"], "backend 'NOPE' is unknown"),
        (["bench", "--device", "a100"], "is a profile"),
        (["explain", "lama-3.1-8b"], "did you mean 'llama-3.1-8b'"),
        (["explain", "--device", "h200x"], "did you mean 'h200'"),
        (["explain", "--backend", "TORCH_SPDA"], "did you mean 'TORCH_SDPA'"),
        (["explain", "--backend", "prefill.decode=TORCH_SDPA"], "names a phase twice"),
        (["explain", "--spec", "[" * 100_000], "--spec is no LayerSpec: RecursionError"),
        (["explain", "--spec", '{"num_heads": ' + "9" * 5000 + "}"], "--spec is no LayerSpec"),
        (["explain", "--spec", '{"num_heads": 4, "head_size": 64, "latent": {}}'], "LatentSpec"),
        (["explain", "/"], "config.json: no such file"),
        (["explain", "/dev/null"], "is not a regular file"),
        (["explain", "x" * 5000], "model 'xxx"),
        (["run", "--cache-gb", "1e9"], "; lower --cache-gb"),
        (["run", "--cache-gb", "1e308"], "--cache-gb=1e+308 must be positive, 1e+09 at most"),
        (["run", "--plot", "/nowhere/p.png"], "/nowhere is no folder"),
        (["run", "--plot", "/tmp"], "must end with one of .png"),
        (["run", "--plot", "p.exe"], "must end with one of .png"),
        (["run", "--seed", "9" * 30], "--seed"),
        (["run", "--seed", "-1"], "--seed"),
        (["run", "--layers", "9" * 30], "--layers"),
        (["run", "--trace", "/absent.csv"], "/absent.csv: can't be read"),
        (["run", "--trace", "/dev/zero"], "is not a regular file"),
        (["run", "--scale", "nan"], "--scale=nan must be positive"),
        (["run", "--scale", "1e308"], "--scale=1e+308 must be positive, 1e+06 at most"),
        (["tune", "--out", "/dev/full"], "--out=/dev/full: is there already and not a regular file"),
        (["tune", "--out", "."], "--out=.: is there already and not a regular file"),
        (["tune", "--out", "/nowhere/t.json"], "/nowhere is no folder; create it first"),
        (["tune", "--seconds", "nan"], "--seconds=nan must be 0 or positive"),
        (["bench", "--plot", "/nowhere/p.png"], "/nowhere is no folder"),
        (["bench", "999999999999q1s1k"], "8q1s2k or q2k"),
        (["bench", "999999q1s1k"], "makes more than 65536 sequences"),
        (["bench", "q999999k", "--spec", SMALL], "; name a smaller batch"),
        (["bench", "2q1s64", "--seconds", "1e300"], "must be positive, 3600 at most"),
        (["bench", "2q1s64", "--seconds", "inf"], "must be positive"),
    ],
)  # fmt: skip
def test_errors_are_one_clear_message(args: list[str], says: str) -> None:
    code, out, err = here(*args)
    assert code == 2 and says in " ".join(err.replace("│", "").split()) and not out
    assert len(err) < 3000


@pytest.mark.parametrize("command", ["explain", "list"])
def test_a_misspelt_variable_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BAKEND", "1")
    code, _, errors = here(command)
    assert code == 2 and "did you mean 'POLYATTN_BACKEND'" in errors


def test_version() -> None:
    text = f"polyattn {polyattn.__version__}\n"
    assert here("--version") == (0, text, "")
    found = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == text
    assert "--version" in here("--help")[1]


def test_a_bench_that_measures_nothing_exits_1() -> None:
    spec = '{"num_heads": 4, "head_size": 60, "dtype": "float32", "alibi": true}'
    code, out, _ = here("bench", "2q1s64", "--spec", spec, "--backend", "EXAMPLE_ATTN", "--json")
    assert code == 1 and "head_size" in json.loads(out)["rows"][0]["cannot"]


def test_a_backend_is_benched_by_its_name_in_lower_case() -> None:
    args = ("bench", "2q1s64", "--spec", SMALL, "--seconds", "0.001", "--json")
    code, out, _ = here(*args, "--backend", "torch_sdpa")
    assert code == 0 and json.loads(out)["rows"][0]["backend"] == "TORCH_SDPA"


def process(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "check": False, "timeout": 120} | kwargs
    return subprocess.run([*COMMAND, *args], **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("args", [["list"], ["--help"], ["explain", "--device", "h200", "--json"]])
def test_a_full_disk_is_a_line(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        found = process(*args, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert found.returncode == 2
    assert found.stderr == "polyattn: standard output: No space left on device\n"


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&-", "2>&-"])
@pytest.mark.parametrize("command", ["list", "explain --device h200"])
def test_closed_streams(command: str, streams: str) -> None:
    line = f"exec {' '.join(COMMAND)} {command} {streams}"
    found = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert found.returncode == (0 if streams == "2>&-" else 2)
    said = "polyattn: standard output is closed\n" if streams == ">&-" else ""
    assert found.stderr == said


NOBODY = """
import os, pwd, sys
os.environ.pop("HOME", None)
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
"""


@pytest.mark.parametrize(
    "args", [["list"], ["doctor"], ["explain", "--device", "cpu"], ["run", "--requests", "1"]]
)
def test_no_home_and_no_account(args: list[str]) -> None:
    """As a container's user with a number and no entry in /etc/passwd."""
    code = f"{NOBODY}\nfrom polyattn.tools.cli.entry import run; sys.exit(run(sys.argv[1:]))"
    found = python("-c", code, *args)
    # Triton can't be imported without a home: that is for doctor to say, and with exit code 1.
    assert found.returncode in (0, int(args == ["doctor"])), found.stderr
    assert "Traceback" not in found.stderr


def test_settings_can_be_imported_without_a_home() -> None:
    code = (
        f"{NOBODY}\nimport polyattn.settings\nprint(polyattn.settings.current_settings().sources)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "()\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children hear SIGINT: where tests run in the background the shell has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_list(tmp_path: Path) -> None:
    from zoo.animals import ANIMALS
    from zoo.build import install

    hangs, waits = ANIMALS["import-hangs"], tmp_path / "waits"
    source = f"import pathlib\npathlib.Path({str(waits)!r}).touch()\n{hangs.source}"
    install(tmp_path, replace(hangs, source=source))
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "POLYATTN_PLUGIN_TIMEOUT": "60"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, "list"], env=env, stdout=pipe, stderr=pipe, text=True
    ) as child:
        while not waits.exists():
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert (child.returncode, out, err) == (130, "", "polyattn: interrupted\n")


DEAF = """
import sys, time
from polyattn.tools.cli import entry, listing

def deaf(as_json):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except BaseException:
        time.sleep(60)

listing.show = deaf
sys.argv = ["polyattn", "list"]
sys.exit(entry.main())
"""
"""A command that drops an interrupt, as finalizers and some libraries' imports do."""


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_a_library_drops_ends_the_command() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", DEAF], stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stderr is not None and child.stderr.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err) == (130, "polyattn: interrupted\n")


COMMANDS = (["list"], ["explain", "llama-3.1-8b"], ["run", "llama-3.1-8b"])


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_in_a_commands_first_second(command: list[str], tmp_path: Path) -> None:
    """At ten moments, those between the next command's; a plugin's import hangs.

    An interrupt that is dropped costs a minute.
    """
    from zoo.animals import ANIMALS
    from zoo.build import install

    install(tmp_path, ANIMALS["import-hangs"])
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "POLYATTN_PLUGIN_TIMEOUT": "60"}
    pipe = subprocess.PIPE
    for moment in range(COMMANDS.index(command) % 2, 20, 2):
        with subprocess.Popen(
            [*COMMAND, *command], env=env, stdout=pipe, stderr=pipe, text=True
        ) as child:
            time.sleep(0.05 * (1 + moment))
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=30)
        if "init_import_site" in err:
            continue  # on a busy machine Python itself hasn't started by then
        # Before `main` runs, Python itself ends the process, by the signal.
        assert child.returncode in (130, -signal.SIGINT), (moment, err)
        assert child.returncode < 0 or err == "polyattn: interrupted\n", (moment, err)


def test_what_others_print_is_not_in_the_json() -> None:
    code = (
        "import os, sys\nfrom polyattn.tools.cli import listing\n"
        "rows = listing.plugin_rows\n"
        "def noisy(registry):\n    print('a print')\n    os.write(1, b'a write\\n')\n"
        "    return rows(registry)\n"
        "listing.plugin_rows = noisy\n"
        "from polyattn.tools.cli.entry import run\nsys.exit(run(['list', '--json']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["plugins"]
    assert "a print" in found.stderr and "a write" in found.stderr


def test_list_does_not_call_a_gpu_backend_ready() -> None:
    text = here("list")[1]
    assert "ready" not in text and "installed" in text
    states = {
        row["name"]: row["state"] for row in json.loads(here("doctor", "--json")[1])["backends"]
    }
    assert states["TORCH_SDPA"] == "ready"
    assert states["TRITON_ATTN"] != "ready"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("deep.jsonl", "line 1: not JSON: RecursionError"),
        ("long.jsonl", "line 1: not JSON"),
        ("bytes.jsonl", "can't be read"),
        ("long.csv", "line 2: not CSV: field larger than field limit"),
        ("fifo.jsonl", "is not a regular file"),
    ],
)
def test_bad_traces(files: Path, name: str, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(files / name)
    assert says in str(caught.value) and len(str(caught.value)) < 600


def test_a_trace_may_begin_with_a_bom_and_hold_line_separators(files: Path) -> None:
    assert [r.prompt for r in read_trace(files / "bom.jsonl")] == [9]


@pytest.mark.parametrize(
    ("seed", "count"), [(7, 50), pytest.param(9, 2000, marks=pytest.mark.sweep)]
)
def test_generated_command_lines(
    files: Path, seed: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but an exit code may come out of a command line; an exception fails the test."""
    monkeypatch.chdir(tmp_path)
    codes = set()
    for variables, line in command_lines(seed, count, files):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            code, _, err = here(*line)
        assert code in (0, 1, 2) and "Traceback" not in err, (variables, line)
        assert code != 2 or err.strip(), (variables, line)
        codes.add(code)
    assert {0, 2} <= codes
    assert Path("/dev/full").is_char_device()


def test_a_home_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the remedy, and nothing is measured before."""
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    code, out, errors = here("tune", "--seconds", "1")
    assert code == 2 and not out
    assert f"{tmp_path / 'home' / 'polyattn'} can't be made: " in errors and "--out FILE" in errors


def test_tune_keeps_an_older_table_where_nothing_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    path.write_text("as it was")
    line = ("tune", "--seconds", "0", "--backend", "TORCH_SDPA", "--out", str(path))
    code, out, _ = here(*line)
    assert code == 1 and "no table is written" in out
    assert path.read_text() == "as it was"
