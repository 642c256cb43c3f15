"""The module `flashinfer` itself, with the names of all its modules."""

from polyattn_flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from polyattn_flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from polyattn_flashinfer.mla import BatchMLAPagedAttentionWrapper
from polyattn_flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from polyattn_flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper", "append_paged_kv_cache", "append_paged_mla_kv_cache",
    "get_batch_indices_positions", "get_seq_lens", "merge_state", "merge_state_in_place",
    "merge_states", "single_decode_with_kv_cache", "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]  # fmt: skip
