"""The calls that this integration served, and those that it didn't."""

from polyattn.runtime.ledger import Ledger

LEDGER = Ledger("transformers", "transformers' own attention")
