"""Does a kernel for Hopper read a register that nothing wrote? Seen in ptxas's code, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bUR(\d+)\b")
WRITES = re.compile(r"U[A-Z]|R2UR|S2UR|CS2UR|REDUX|VOTEU")
"""How the names of instructions begin whose first operand, a uniform register, is their result."""
PAIRS = re.compile(r"\.64|\.WIDE|CS2UR")


def read_unwritten(cubin: bytes) -> list[str]:
    """Return the instructions that are first to name a uniform register, and read it.

    Descriptors of matrix products lie in uniform registers, from wherever control flow may come: they
    are written before, in the order of the code, too.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [NVDISASM, "-c", file.name], capture_output=True, text=True, check=True
        )
    return unwritten_in(run.stdout)


def unwritten_in(text: str) -> list[str]:
    """Return these instructions of a disassembly."""
    found, written = [], set()
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        result = REGISTER.fullmatch(operands[0]) if WRITES.match(name) else None
        for operand in operands[1:] if result else operands:
            for register in map(int, REGISTER.findall(operand)):
                # A product's four: the descriptors of A, where it isn't in registers, and of B.
                first, count = (register + 2, 2) if "gdesc" in operand else (register, 1)
                if set(range(first, first + count)) - written:
                    found.append(f"{name} {match[2]}")
        if result:
            number = int(result[1])
            written |= {number, number + 1} if PAIRS.search(name) else {number}
    return found
