"""Views of a `Batch` by the metadata names of TensorRT-LLM and vLLM, for an engine that keeps them.

A view copies no tensor of the batch and computes the other values on first use. The names and meanings
are those of `tensorrt_llm._torch.attention_backend.interface.AttentionMetadata` and
`vllm.v1.attention.backend.CommonAttentionMetadata`. Copy this file and keep what your engine reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from polyattn import Batch
from polyattn.errors import BatchError
from torch import Tensor


class TensorRTLLMMetadata:
    """A batch by the names of TensorRT-LLM's `AttentionMetadata`.

    There `seq_lens` counts a sequence's *query* tokens and what the cache holds of it is apart; here
    `Batch.seq_lens` counts both together, and `Batch.query_lens` the former.

    - `num_contexts`: how many of the first sequences are in their context phase. None: those of more
      than one query token, which must come first (a prompt of one token counts as a generation; one
      that verifies drafts has to be told apart by this number).
    - `prompt_lens` (num_seqs,): each sequence's prompt, which a batch doesn't know of generations.
    - `cross`: keys and values are another sequence's, `Batch.seq_lens` of them.

    Raises `BatchError`.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        num_contexts: int | None = None,
        prompt_lens: Sequence[int] | None = None,
        cross: bool = False,
    ):
        if num_contexts is not None and not 0 <= num_contexts <= batch.num_seqs:
            raise BatchError(
                f"num_contexts={num_contexts} must be from 0 to the batch's {batch.num_seqs} sequences"
            )
        if prompt_lens is not None and len(prompt_lens) != batch.num_seqs:
            raise BatchError(
                f"prompt_lens has {len(prompt_lens)} entries; the batch has {batch.num_seqs} sequences"
            )
        self.batch, self.is_cross = batch, cross
        self._num_contexts, self._prompt_lens = num_contexts, prompt_lens

    @property
    def num_seqs(self) -> int:
        """Sequences: `Batch.num_seqs`."""
        return self.batch.num_seqs

    @cached_property
    def num_contexts(self) -> int:
        """Sequences in their context phase, which come first."""
        if self._num_contexts is not None:
            return self._num_contexts
        long = [query > 1 for query in self.batch.query_lens]
        count = sum(long)
        if not all(long[:count]):
            first = long.index(False)
            raise BatchError(
                f"sequence {first} has one query token and stands before a longer one; TensorRT-LLM's "
                "metadata has contexts first: order the batch so, or give num_contexts"
            )
        return count

    @property
    def num_generations(self) -> int:
        """Sequences that generate: all behind the contexts."""
        return self.num_seqs - self.num_contexts

    @cached_property
    def seq_lens(self) -> Tensor:
        """Query tokens of each sequence: int32 (num_seqs,) on the host; `Batch.query_lens`."""
        return torch.tensor(self.batch.query_lens, dtype=torch.int32)

    @cached_property
    def seq_lens_cuda(self) -> Tensor:
        """The same on the batch's device."""
        return self.seq_lens.to(self.batch.device)

    @cached_property
    def seq_lens_kv(self) -> Tensor:
        """New keys of each sequence: `seq_lens`, and with `cross` the other sequence's length."""
        if not self.is_cross:
            return self.seq_lens
        return torch.tensor(self.batch.lens, dtype=torch.int32)

    @cached_property
    def seq_lens_kv_cuda(self) -> Tensor:
        """The same on the batch's device."""
        return self.seq_lens_kv.to(self.batch.device) if self.is_cross else self.seq_lens_cuda

    @property
    def context_lens(self) -> Tensor:
        """Query tokens of each context: int32 (num_contexts,) on the host."""
        return self.seq_lens[: self.num_contexts]

    @property
    def num_ctx_tokens(self) -> int:
        """Query tokens of all contexts."""
        return self.batch.starts[self.num_contexts]

    @property
    def num_tokens(self) -> int:
        """New keys of all sequences; without `cross` the query tokens, `Batch.num_tokens`."""
        return int(self.seq_lens_kv.sum())

    @property
    def prompt_lens(self) -> list[int]:
        """Each sequence's prompt: a context's is its query; of generations what was given."""
        given = self._prompt_lens
        if given is not None:
            return list(given)
        if self.num_generations:
            raise BatchError(
                "prompt_lens of generations isn't in a batch: give prompt_lens= to the view"
            )
        return list(self.batch.query_lens)

    @cached_property
    def position_ids(self) -> Tensor:
        """Each query token's position: int32 (num_tokens,), or (axes, num_tokens), on the device."""
        return self.batch.token_positions.int()

    @property
    def num_cached_tokens_per_seq(self) -> list[int]:
        """What the cache held before the step, of `kv_cache_params`: length less query."""
        if self.is_cross:
            raise BatchError(
                "num_cached_tokens_per_seq of a cross-attention isn't in a batch: its lengths are the "
                "other sequences', and say nothing of when they were stored"
            )
        return computed(self.batch)

    @property
    def kv_lens_cuda(self) -> Tensor:
        """Keys of each sequence after the step, int32 (num_seqs,) on the device: `Batch.seq_lens`."""
        return self.batch.seq_lens

    @property
    def block_ids_per_seq(self) -> Tensor | None:
        """Each sequence's blocks: `Batch.block_table`."""
        return self.batch.block_table


class VLLMMetadata:
    """A batch by the names of vLLM's `CommonAttentionMetadata`; `causal` is the layer spec's."""

    def __init__(self, batch: Batch):
        self.batch = batch

    @property
    def query_start_loc(self) -> Tensor:
        """int32 (num_reqs + 1,) on the device: `Batch.query_start_loc`."""
        return self.batch.query_start_loc

    @cached_property
    def query_start_loc_cpu(self) -> Tensor:
        """The same on the host: `Batch.starts`."""
        return torch.tensor(self.batch.starts, dtype=torch.int32)

    @property
    def seq_lens(self) -> Tensor:
        """Computed and new tokens of each request, int32 (num_reqs,): `Batch.seq_lens`."""
        return self.batch.seq_lens

    @cached_property
    def seq_lens_cpu(self) -> Tensor:
        """The same on the host: `Batch.lens`."""
        return torch.tensor(self.batch.lens, dtype=torch.int32)

    @cached_property
    def num_computed_tokens_cpu(self) -> Tensor:
        """Tokens that were there before the step, int32 (num_reqs,) on the host; a padding row's 0."""
        return torch.tensor(computed(self.batch), dtype=torch.int32)

    def compute_num_computed_tokens(self) -> Tensor:
        """Return the same on the device."""
        return self.num_computed_tokens_cpu.to(self.batch.device)

    @property
    def num_reqs(self) -> int:
        """Requests: `Batch.num_seqs`."""
        return self.batch.num_seqs

    def batch_size(self) -> int:
        """Return the requests, too."""
        return self.num_reqs

    @property
    def num_actual_tokens(self) -> int:
        """Query tokens, padding rows included: `Batch.num_tokens`."""
        return self.batch.num_tokens

    @property
    def max_query_len(self) -> int:
        """The longest query: `Batch.max_query_len`."""
        return self.batch.max_query_len

    @property
    def max_seq_len(self) -> int:
        """The longest sequence: `Batch.max_seq_len`."""
        return self.batch.max_seq_len

    def naive_query_lens(self) -> Tensor:
        """Return each request's query tokens, int32 (num_reqs,) on the device."""
        return self.query_start_loc.diff()

    @property
    def block_table_tensor(self) -> Tensor | None:
        """int32 (num_reqs, blocks): `Batch.block_table`."""
        return self.batch.block_table

    @property
    def slot_mapping(self) -> Tensor | None:
        """int64 (num_actual_tokens,), -1 skips: `Batch.slot_mapping`."""
        return self.batch.slot_mapping


def computed(batch: Batch) -> list[int]:
    """Return what each sequence's cache held before the step; a padding row's is 0."""
    pairs = zip(batch.lens, batch.query_lens, strict=True)
    return [max(length - query, 0) for length, query in pairs]


if __name__ == "__main__":
    table = torch.tensor([[3, 4], [5, 0], [6, 7]], dtype=torch.int32)
    # A prompt of 5 tokens, a chunk of 3 behind 4 cached tokens, and a sequence at its 20th token.
    step = Batch.from_lens([5, 3, 1], [5, 7, 20], table, 16)
    ours = TensorRTLLMMetadata(step)
    print(f"TensorRT-LLM: {ours.num_contexts} contexts, {ours.num_cached_tokens_per_seq} cached")
    print(f"vLLM: {VLLMMetadata(step).num_computed_tokens_cpu.tolist()} computed")
