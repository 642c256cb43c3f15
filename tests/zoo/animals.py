"""The animals: what each broken plugin's module holds, and the words that must be said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyattn.plugin import Capabilities

HEAD = """
from polyattn.plugin import *
from polyattn.plugin import AttentionKind, BackendInfo, Capabilities, Platform, Priority, Proof

INF, NAN = float("inf"), float("nan")

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Shy:
    def __repr__(self):
        raise RuntimeError("no repr")

@hookimpl
def polyattn_api_versions():
    return (1, 1)

def info(name="NAME", **more):
    more.setdefault("path", "polyattn_cpu.sdpa:TorchSDPA")
    more.setdefault("summary", "a zoo animal")
    caps = Capabilities(platforms={"cpu": ()}, dtypes=frozenset({"float32"}))
    more.setdefault("capabilities", caps)
    return BackendInfo(name=name, **more)

def claims(**more):
    return info(capabilities=Capabilities(**({"platforms": {"cpu": ()}} | more)))

def device(**more):
    fields = dict(platform="fakechip", arch="x1", name="Fake", torch_device="cpu") | more
    return Device(**fields)
"""


@dataclass(frozen=True)
class Animal:
    """One broken distribution. `where` it must be named: in `problems`, `doctor`'s, or the log."""

    name: str
    source: str
    says: str
    where: str = "problems"
    files: Mapping[str, bytes] = field(default_factory=dict)
    point: str = ""


ANIMALS: dict[str, Animal] = {}


def add(name: str, source: str, says: str, where: str = "problems", **more: object) -> None:
    assert name not in ANIMALS, name
    ANIMALS[name] = Animal(name, source, says, where, **more)  # type: ignore[arg-type]


def backends(code: str) -> str:
    return f"{HEAD}\n@hookimpl\ndef polyattn_backends():\n    return {code}\n"


def platforms(code: str, more: str = "") -> str:
    return f"{HEAD}\n@hookimpl\ndef polyattn_platforms():\n    return {code}\n{more}\n"


# Fields of the wrong type.
WRONG = {
    "none": "None",
    "int": "7",
    "bytes": "b'x'",
    "list": "[1]",
    "dict": "{1: 2}",
    "shy": "Shy()",
}
FIELDS: dict[str, tuple[str, dict[str, str]]] = {
    "BackendInfo": (
        "[info(**{%r: %s})]",
        {"name": "", "summary": "", "path": "", "capabilities": "", "probe": "none", "requires": "",
         "install": "", "priorities": "", "proof": "", "proof_of_runs": ""},
    ),
    "Platform": (
        "[Platform(**({'name': 'fakechip', 'detect': 'a:b'} | {%r: %s}))]",
        {"name": "", "detect": "", "rank": "int", "device_types": "", "current": "none"},
    ),
    "Priority": (
        "[info(priorities=(Priority(**({'score': 1} | {%r: %s})),))]",
        {"score": "int", "platform": "none", "archs": "", "phase": "none", "kind": "none", "why": ""},
    ),
}  # fmt: skip
for kind, (template, fields_) in FIELDS.items():
    make = platforms if kind == "Platform" else backends
    for field_name, skip in fields_.items():
        for wrong, code in WRONG.items():
            if wrong != skip and not (field_name.startswith("proof") and wrong == "dict"):
                name = f"{kind.lower()}-{field_name}-{wrong}"
                add(name, make(template % (field_name, code)), f"{kind}.{field_name}")
CLAIMS = [field.name for field in dataclasses.fields(Capabilities)]
for field_name in CLAIMS:
    for wrong in ("none", "bytes", "list"):
        code = f"[claims({field_name}={WRONG[wrong]})]"
        add(f"claims-{field_name.replace('_', '-')}-{wrong}", backends(code), f".{field_name}=")

# Values that can't be.
for name, code, says in (
    ("score-nan", "[info(priorities=(Priority(score=NAN),))]", "Priority.score=nan"),
    ("score-inf", "[info(priorities=(Priority(score=INF),))]", "Priority.score=inf"),
    ("score-bool", "[info(priorities=(Priority(score=True),))]", "Priority.score=True"),
    ("score-huge", "[info(priorities=(Priority(score=10**400),))]", "scores go from 0 to 100"),
    ("priority-phase", "[info(priorities=(Priority(score=1, phase='dekode'),))]", "'decode'"),
    ("priority-arch", "[info(priorities=(Priority(score=1, archs=('sm_90-sm_80',)),))]", "sm_90-"),
    ("priority-platform", "[info(priorities=(Priority(score=1, platform='a b'),))]", "'a b'"),
    ("proof-text", "[info(proof={'cpu': 'measured'})]", "BackendInfo.proof"),
    ("proof-where", "[info(proof={'a b': Proof.MEASURED})]", "'a b' is neither"),
    ("proof-of-runs", "[info(proof_of_runs={'a b': Proof.MEASURED})]", "'a b' can't be named"),
    ("name-empty", "[info('')]", "BackendInfo.name=''"),
    ("name-newline", r"[info('A\nB')]", "BackendInfo.name="),
    ("name-comma", "[info('A,B')]", "BackendInfo.name='A,B'"),
    ("name-equals", "[info('A=B')]", "BackendInfo.name='A=B'"),
    ("name-space", "[info('A B')]", "BackendInfo.name='A B'"),
    ("name-markup", "[info('[red]A[/]')]", "BackendInfo.name='[red]A[/]'"),
    ("name-escape", r"[info('\x1b[31mA')]", "BackendInfo.name="),
    ("name-long", "[info('A' * 100_000)]", "BackendInfo.name="),
    ("name-foreign", "[info('É')]", "BackendInfo.name='É'"),
    ("path-no-colon", "[info(path='a.b')]", "write 'package.module:Class'"),
    ("path-empty", "[info(path='')]", "BackendInfo.path=''"),
    ("path-colons", "[info(path='a:b:c')]", "BackendInfo.path='a:b:c'"),
    ("path-dots", "[info(path='.a:b')]", "BackendInfo.path='.a:b'"),
    ("path-file", "[info(path='/tmp/a.py:b')]", "BackendInfo.path="),
    ("path-probe", "[info(probe='probe')]", "BackendInfo.probe='probe'"),
    ("requires-junk", "[info(requires=('>>> no',))]", "is no requirement"),
    ("requires-version", "[info(requires=('torch>=banana',))]", "is no requirement"),
    ("requires-empty", "[info(requires=('',))]", "is no requirement"),
    ("requires-text", "[info(requires='torch')]", "BackendInfo.requires='torch'"),
    ("twice", "[info('SAME'), info('same')]", "declares SAME twice"),
    ("excludes-typo", "[claims(excludes=((frozenset({'alibbi', 'decode'}), ''),))]", "'alibi'"),
    ("excludes-arch", "[claims(excludes=((frozenset({'bfloat16', 'sm_75'}), ''),))]", "'sm_75'"),
    ("excludes-one", "[claims(excludes=((frozenset({'decode'}), ''),))]", "two things or more"),
    ("claims-arch", "[claims(platforms={'cpu': ('no arch',)})]", "'no arch' is no arch pattern"),
    ("claims-range", "[claims(platforms={'cuda': ('sm_90-sm_80',)})]", "is no arch pattern"),
    ("claims-platform", "[claims(platforms={'C P U': ()})]", "can't be a platform's name"),
    ("claims-pairs", "[claims(v_head_pairs=frozenset({(0, 8)}))]", "Capabilities.v_head_pairs"),
    ("contradiction", "[claims(phases=frozenset({'mixed'}))]", "'mixed' needs both"),
    ("sizes-zero", "[claims(head_sizes=multiples(0))]", "Sizes.multiple=0"),
    ("sizes-none", "[claims(head_sizes=one_of())]", "one_of() lists no size"),
    ("sizes-text", "[claims(head_sizes=one_of('64'))]", "Sizes.values"),
    ("sizes-range", "[claims(head_sizes=Sizes(low=9, high=3))]", "Sizes.high=3"),
    ("sizes-negative", "[claims(head_sizes=one_of(-64))]", "sizes are 1 or more"),
    ("preferred", "[claims(block_sizes=one_of(64), preferred_block_size=16)]", "not among"),
    ("unknown-field", "[info(colour='red')]", "colour"),
    ("hook-raises", "1 / 0", "ZeroDivisionError"),
    ("hook-silent", "(_ for _ in ()).throw(Silent())", "its text can't be shown"),
    ("hook-exits", "__import__('sys').exit(3)", "SystemExit: 3"),
    ("hook-interrupts", "(_ for _ in ()).throw(KeyboardInterrupt())", "KeyboardInterrupt"),
    ("hook-hangs", "__import__('time').sleep(3600)", "did not answer within"),
    ("hook-recurses", "polyattn_backends()", "RecursionError"),
    ("hook-text", "'junk'", "not a list of BackendInfo"),
    ("hook-number", "42", "not a list of BackendInfo"),
    ("hook-generator", "(x for x in [info()])", "not a list of BackendInfo"),
    ("hook-dict", "{'A': info('A')}", "not a list of BackendInfo"),
    ("hook-junk", "['junk']", "'junk' in its list"),
    ("hook-none", "[None]", "None in its list"),
    ("hook-class", "[BackendInfo]", "not a BackendInfo"),
    ("hook-shy", "[Shy()]", "without a repr"),
    ("hook-subclass", "[type('B', (BackendInfo,), {})(**vars(info()))]", "a subclass"),
    ("hook-long", "(_ for _ in ()).throw(RuntimeError('[red]\\x1b[31m' + 'x' * 100_000))", "[red]x"),
):  # fmt: skip
    add(name, backends(code), says)
for name, code, says in (
    ("platform-name", "[Platform(name='My Chip', detect='a:b')]", "Platform.name='My Chip'"),
    ("platform-comma", "[Platform(name='a,b', detect='a:b')]", "Platform.name='a,b'"),
    ("platform-detect", "[Platform(name='chip', detect='detect')]", "Platform.detect='detect'"),
    ("platform-rank", "[Platform(name='chip', detect='a:b', rank=NAN)]", "Platform.rank=nan"),
    ("platform-info", "[info()]", "not a Platform"),
    ("platform-a", "[Platform(name='twochip', detect='a:b')]", "'twochip' is claimed by"),
    ("platform-b", "[Platform(name='twochip', detect='a:b')]", "remove one"),
    ("platform-cpu", "[Platform(name='cpu', detect='a:b', rank=99)]", "polyattn-cpu keeps it"),
):
    add(name, platforms(code), says)
add("duplicate-a", backends("[info('TWICE')]"), "'TWICE' is claimed by")
add("duplicate-b", backends("[info('twice')]"), "pip uninstall zoo-duplicate-b")
add("takes-ours", backends("[info('TORCH_SDPA')]"), "polyattn-cpu keeps it")
add("takes-ours-lower", backends("[info('flex_attention')]"), "pip uninstall zoo-takes-ours-lower")

# API versions.
for name, code in {
    "none": "None", "float": "(1.0, 1.0)", "text": "'11'", "one": "(1,)", "three": "(1, 1, 1)",
    "bool": "(True, True)", "number": "1", "reversed": "(2, 1)", "later": "(7, 9)",
    "set": "{1}", "strings": "('1', '1')", "huge": "(10**400, 10**400)",
}.items():  # fmt: skip
    says = {
        "later": "needs API version 7",
        "none": "does not implement",
        "huge": "needs API version",
    }
    add(
        f"api-{name}",
        HEAD.replace("return (1, 1)", f"return {code}"),
        says.get(name, "it must be two whole numbers"),
    )
add("api-absent", "x = 1\n", "does not implement polyattn_api_versions")
add("api-arguments", HEAD.replace("versions()", "versions(surprise)"), "surprise")

# The hook module itself.
for name, source, says in (
    ("import-error", "import a_vendor_library_that_is_absent\n", "ModuleNotFoundError"),
    ("import-os-error", "raise OSError('libcuda.so.1: no such file')\n", "OSError: libcuda.so.1"),
    ("import-syntax", "def broken(:\n", "SyntaxError"),
    ("import-exits", "import sys\nsys.exit(3)\n", "SystemExit: 3"),
    ("import-interrupts", "raise KeyboardInterrupt\n", "KeyboardInterrupt"),
    ("import-hangs", "import time\ntime.sleep(3600)\n", "did not answer within"),
    ("import-bytes", "x = '\udcff'\n", "SyntaxError"),
    ("import-silent", HEAD + "\nraise Silent()\n", "its text can't be shown"),
    ("import-recurses", "def f(): f()\nf()\n", "RecursionError"),
    ("import-base", "class End(BaseException): pass\nraise End('now')\n", "End: now"),
):
    add(name, source, says)
add("point-name", backends("[info('POINT')]"), "can't be used", point="a plugin, with a comma")

# What a path leads to: named by doctor, which imports what is ready here.
CLASS = b"class Kernel:\n    pass\n"
for name, parent, module, says in (
    ("parent-raises", b"raise RuntimeError('no chip')", CLASS, "RuntimeError: no chip"),
    ("parent-os-error", b"raise OSError('libcuda.so.1')", CLASS, "OSError: libcuda.so.1"),
    ("parent-exits", b"import sys; sys.exit(4)", CLASS, "exits, with 4"),
    ("parent-interrupts", b"raise KeyboardInterrupt", CLASS, "KeyboardInterrupt"),
    ("parent-hangs", b"import time; time.sleep(3600)", CLASS, "did not answer within"),
    ("parent-syntax", b"def broken(:", CLASS, "SyntaxError"),
    ("parent-bytes", b"x = '\xff'", CLASS, "SyntaxError"),
    ("module-syntax", b"", b"def broken(:", "SyntaxError"),
    ("module-bytes", b"", b"x = '\xff'\n" + CLASS, "SyntaxError"),
    ("module-nul", b"", b"\0" + CLASS, "null byte"),
    ("module-raises", b"", b"raise OSError('libcuda.so.1')\n" + CLASS, "OSError: libcuda.so.1"),
    ("module-other", b"", b"class Other:\n    pass\n", "has no 'Kernel'"),
    ("module-constant", b"", b"Kernel = 3\n", "not a class"),
):  # fmt: skip
    package = "zoo_package_" + name.replace("-", "_")
    add(
        name,
        backends(f"[info('{name.upper()}', path='{package}.inner.kernel:Kernel')]"),
        says,
        "doctor",
        files={
            f"{package}/__init__.py": parent,
            f"{package}/inner/__init__.py": b"",
            f"{package}/inner/kernel.py": module,
        },
    )
add("module-missing", backends("[info('MISSING', path='zoo_nowhere.a:B')]"), "is missing", "doctor")

# Probes and detectors.
for name, body, says in (
    ("raises", "raise RuntimeError('no chip')", "RuntimeError: no chip"),
    ("exits", "__import__('sys').exit(5)", "SystemExit: 5"),
    ("interrupts", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("silent", "raise Silent()", "its text can't be shown"),
    ("hangs", "__import__('time').sleep(3600)", "did not answer within"),
    ("number", "return 7", "returned 7"),
    ("true", "return True", "returned True"),
    ("list", "return ['no']", "returned ['no']"),
    ("shy", "return Shy()", "without a repr"),
    ("empty", "return ''", "returned ''"),
    ("arguments", "return surprise", "NameError"),
):
    probe = f"zoo_probe_{name}:ask"
    add(
        f"probe-{name}",
        backends(f"[info('PROBE_{name}', probe='{probe}')]") + f"\ndef ask():\n    {body}\n",
        says,
        "doctor",
    )
    detect = f"zoo_detector_{name}:ask"
    add(
        f"detector-{name}",
        platforms(
            f"[Platform(name='chip_{name}', detect='{detect}')]",
            f"def ask(torch_device):\n    {body}\n",
        ),
        says,
        "doctor",
    )
for name, body, says in (
    ("other", "return device()", "not a Device of its own"),
    ("arch", "return device(platform='chip_arch', arch=None)", "Device.arch=None"),
    ("name", "return device(platform='chip_name', name=3)", "Device.name=3"),
    ("nan", "return device(platform='chip_nan', matmul=NAN)", "Device.matmul=nan"),
    (
        "profile",
        "return device(platform='chip_profile', torch_device=None)",
        "torch_device is None",
    ),
):
    detect = f"zoo_detector_{name}:ask"
    add(
        f"detector-{name}",
        platforms(
            f"[Platform(name='chip_{name}', detect='{detect}', rank=-1)]",
            f"def ask(torch_device):\n    {body}\n",
        ),
        says,
        "doctor",
    )

# Policies.
for name, body, says in (
    ("raises", "1 / 0", "ZeroDivisionError"),
    ("exits", "__import__('sys').exit(6)", "SystemExit: 6"),
    ("interrupts", "raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("hangs", "__import__('time').sleep(3600)", "did not answer within"),
    ("generator", "return (name for name in ranking)", "generator"),
    ("text", "return ranking[0]", "it may only reorder or drop"),
    ("empty", "return []", "it may only reorder or drop"),
    ("invents", "return ['NOBODY']", "it may only reorder or drop"),
    ("repeats", "return list(ranking) * 2", "it may only reorder or drop"),
    ("number", "return 7", "it may only reorder or drop"),
    ("shy", "return Shy()", "without a repr"),
    ("silent", "raise Silent()", "its text can't be shown"),
):
    add(
        f"rank-{name}",
        f"{HEAD}\n@hookimpl\ndef polyattn_rank(spec, device, phase, ranking):\n    {body}\n",
        says,
        "log",
    )

HEALTHY: dict[str, Animal] = {}
"""Plugins that are odd and right: nothing may be said of them."""


def healthy(name: str, source: str, **more: object) -> None:
    ANIMALS[name] = HEALTHY[name] = Animal(name, source, "", "nowhere", **more)  # type: ignore[arg-type]


healthy("healthy", backends("[info('HEALTHY')]"))
healthy("lower-case", backends("[info('lower_case')]"))
healthy(
    "texts",
    backends(
        r"[info('TEXTS', summary='[red]\x1b[31m' + 'x' * 100_000, install='a\nb\u2028c',"
        r" probe='zoo_texts:ask')]"
    )
    + "\ndef ask():\n    return '[bold]\\x1b]0;title\\x07' + 'y' * 100_000\n",
)
healthy(
    "prints",
    "print('import prints')\nimport os\nos.write(1, b'import writes\\n')\n"
    + backends("print('hook prints') or [info('PRINTS', probe='zoo_prints:ask')]")
    + "\ndef ask():\n    os.write(1, b'probe writes')\n    print('probe prints')\n"
    + "\n@hookimpl\ndef polyattn_rank(spec, device, phase, ranking):\n    print('rank prints')\n",
)
healthy("needy", backends("[info('NEEDY', requires=('zoo-lib>=2',), install='pip install zoo')]"))
healthy(
    "marker",
    backends("[info('MARKER', requires=('zoo-lib>=2; sys_platform == \"nowhere\"', 'torch>=1'))]"),
)
for name, module in {
    "reexport": b"from .real import (\n    Other,\n    Kernel,\n)\n",
    "star": b"from .real import *\n",
    "lazy": b"def __getattr__(name):\n    from .real import Kernel\n    return Kernel\n",
    "branch": b"if True:\n    Kernel = type('Kernel', (), {})\n",
    "attempt": b"try:\n    import nowhere\nexcept ImportError:\n    from .real import Kernel\n",
    "tuple": b"A, Kernel = 1, type('Kernel', (), {})\n",
    "renamed": b"from .real import Other as Kernel\n",
    "globals": b"globals()['Kernel'] = type('Kernel', (), {})\n",
    "walrus": b"(Kernel := type('Kernel', (), {}))\n",
    "latin": b"# coding: latin-1\nx = '\xe9'\n" + CLASS,
}.items():
    package = f"zoo_healthy_{name}"
    healthy(
        f"{name}-class",
        backends(f"[info('{name.upper()}', path='{package}.kernel:Kernel')]"),
        files={
            f"{package}/__init__.py": b"",
            f"{package}/kernel.py": module,
            f"{package}/real.py": CLASS + b"class Other:\n    pass\n",
        },
    )
healthy(
    "moved-package",
    backends("[info('MOVED', path='zoo_moved.kernel:Kernel')]"),
    files={
        "zoo_moved/__init__.py": b"__path__.append(__path__[0] + '/elsewhere')\n",
        "zoo_moved/elsewhere/kernel.py": CLASS,
    },
)
healthy(
    "namespace-package",
    backends("[info('NAMESPACE', path='zoo_space.inner.kernel:Kernel')]"),
    files={"zoo_space/inner/kernel.py": CLASS},
)
