"""A source by hand on one backend, interpreted: right, and caught when it lies. Its name is given."""

from __future__ import annotations

import sys

from polyattn import register_variant, resolve_device, select
from polyattn.conformance.checks.table import run_case
from polyattn.conformance.derive import derive
from polyattn.errors import SelectionError
from polyattn.registry.discovery import discover
from test_variants import BASE, LENS, assert_right, run
from written_by_hand import HONEST, LYING, given

DECODES = ([1] * 5, LENS[1])


def main(backend: str) -> None:
    for variant in (HONEST, LYING):
        register_variant(variant)
    for lens in (LENS, DECODES):
        step = given(5)
        layer = {name: step.pop(name) for name in ("gain", "shift")}
        out, expected = run(BASE.replace(variant="bent"), backend, lens, inputs=layer, step=step)
        assert_right(out, expected)
    device = resolve_device("cpu")
    (interpreter,) = discover().backends[backend].builds_on(device.platform)
    cases = derive(interpreter, device)
    found = {}
    for case in cases:
        name = case.spec.variant
        if (
            name in ("bent", "bent_lie")
            and case.label == f"decoder {name}"
            and case.batch == "decode"
        ):
            try:
                run_case(case, backend, device, 20, 30.0)
                found[name] = "passed"
            except AssertionError:
                found[name] = "caught"
    assert found == {"bent": "passed", "bent_lie": "caught"}, found
    try:
        select(BASE.replace(variant="bent_lie"), backend=backend, verify=True)
    except SelectionError as error:
        assert "its output is wrong" in str(error), error
        print("right")


main(sys.argv[1])
