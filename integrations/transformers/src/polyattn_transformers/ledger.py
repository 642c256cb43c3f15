"""The calls that this integration served, and those that it didn't."""

from polyattn.host import Ledger

LEDGER = Ledger("transformers", "transformers' own attention")
