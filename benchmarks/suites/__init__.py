"""Suites by name: each module has `ROWS`, and its first line says what it asks."""

NAMES = (
    "decode", "prefill", "mixed", "mla", "recurrent", "prefix", "eight_bit", "graphs", "store", "host",
    "same_bits", "sparse", "choice",
)  # fmt: skip
