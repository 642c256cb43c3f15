"""Does a kernel for Hopper read a register that nothing wrote? Seen in ptxas's code, without a GPU."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile

from triton import knobs

BYTES = 16
"""Of an instruction."""
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bUR(\d+)\b")
WRITES = re.compile(r"U[A-Z]|R2UR|S2UR|CS2UR|REDUX|VOTEU")
"""How the names of instructions begin whose first operand, a uniform register, is their result."""
PAIRS = re.compile(r"\.64|\.WIDE|CS2UR")


def told(tool: str, code: bytes, *options: str) -> str:
    """Return what one of Triton's own tools says of a cubin, or of code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage(cubin: bytes) -> dict[str, int]:
    """Return what a kernel takes: `REG`, registers a thread; `STACK`, bytes of it in memory."""
    found = told("cuobjdump", cubin, "--dump-resource-usage")
    return {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", found)}


def code_of(cubin: bytes) -> bytes:
    """Return the instructions of a cubin's functions: its sections `.text.*`."""
    (at,), (size, count, names) = (
        struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    )  # fmt: skip
    sections = [struct.unpack_from("<2I4Q", cubin, at + i * size) for i in range(count)]
    titles = sections[names][4]
    return b"".join(
        cubin[start : start + length]
        for name, _, _, _, start, length in sections
        if cubin.startswith(b".text.", titles + name)
    )


def read_unwritten(codes: list[tuple[str, bytes]]) -> list[str]:
    """Return the instructions that are first to name a uniform register, and read it, by kernel.

    Descriptors of matrix products lie in uniform registers, from wherever control flow may come: they
    are written before, in the order of the code, too. The tool takes a third of a second to start, and
    a fiftieth for a kernel.
    """
    if not codes:
        return []
    whole = told("nvdisasm", b"".join(code for _, code in codes), "-b", "SM90")
    lines = [line for line in whole.splitlines() if INSTRUCTION.match(line)]
    found, first = [], 0
    for name, code in codes:
        last = first + len(code) // BYTES
        found += [f"{name}: {text}" for text in unwritten_in("\n".join(lines[first:last]))]
        first = last
    assert first == len(lines)
    return found


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


LABEL = re.compile(r"^(\.L_\w+):|\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.M)
JUMP, LOAD = re.compile(r"BRA.*`\((\.L_\w+)\)"), re.compile(r"\bLDG\S* R(\d+),")


def waited_for(cubin: bytes) -> list[str]:
    """Return the loads that a step of the shortest loop with products asks for and reads, too.

    A step that does so takes a load's time at least, though the number be the next step's.
    """
    steps: list[list[str]] = []
    labels: dict[str, int] = {}
    lines: list[str] = []
    for label, _, text in LABEL.findall(told("nvdisasm", cubin, "-c")):
        if label:
            labels[label] = len(lines)
            continue
        lines.append(text)
        jump = JUMP.search(text)
        if jump and jump[1] in labels:
            steps.append(lines[labels[jump[1]] :])
    step = min((s for s in steps if any("MMA" in line for line in s)), key=len)
    return [
        line
        for i, line in enumerate(step)
        if (load := LOAD.search(line))
        and any(re.search(rf"\bR{load[1]}\b", later) for later in step[i + 1 :])
    ]
