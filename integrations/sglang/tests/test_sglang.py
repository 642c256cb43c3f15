"""The SGLang backend over its pools' layout, by value; its calls bound against recorded signatures.

Stand-ins have SGLang's fields: the names are those of sglang 0.5.23. `own_engine.py` runs SGLang itself.
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import polyattn_sglang
import pytest
import torch
from formulas import attend, in_window
from polyattn import PolyattnError
from polyattn.errors import SelectionError
from polyattn.selection import running
from polyattn_sglang.attention import ServedAttention
from torch import Tensor

RECORDED = json.loads(
    (Path(__file__).parents[3] / "tests" / "signatures" / "sglang.json").read_text()
)["functions"]
PAGE, SLOTS, CONTEXT, CHUNK = 4, 64, 32, 6


class Pool:
    """Token-major keys and values: (size + page, heads, size) for each layer."""

    requires_physical_write_loc = False

    def __init__(self, heads: int, size: int, v_size: int, sliding: bool):
        self.key = torch.full((SLOTS + PAGE, heads, size), torch.nan)
        self.value = torch.full((SLOTS + PAGE, heads, v_size), torch.nan)
        self.swa_layer_nums = int(sliding)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.key

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.value

    def translate_loc_from_full_to_swa(self, kv_indices: Tensor) -> Tensor:
        """The second pool's pages lie in the opposite order."""
        return (SLOTS // PAGE - kv_indices // PAGE) * PAGE + kv_indices % PAGE


class Mode:
    """A ForwardMode."""

    def __init__(self, name: str):
        self.name = name

    def is_decode_or_idle(self) -> bool:
        return self.name in ("DECODE", "IDLE")


def layer(heads: int = 4, kv_heads: int = 2, size: int = 16, **more: Any) -> Any:
    fields = {
        "tp_q_head_num": heads, "tp_k_head_num": kv_heads, "tp_v_head_num": kv_heads,
        "qk_head_dim": size, "v_head_dim": size, "scaling": 0.3, "layer_id": 0, "logit_cap": 0.0,
        "sliding_window_size": -1, "is_cross_attention": False, "logit_capping_method": "tanh",
        "attn_type": SimpleNamespace(value="decoder"), "use_irope": False, "xai_temperature_len": -1,
    }  # fmt: skip
    return SimpleNamespace(**(fields | more))


class Served:
    """A runner with two requests, and what they hold."""

    def __init__(self, sliding: bool = False, size: int = 16, deterministic: bool = False):
        torch.manual_seed(0)
        self.req_to_token = torch.zeros(5, CONTEXT, dtype=torch.int32)
        pages = torch.randperm(SLOTS // PAGE).view(2, -1) + 1
        slots = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
        self.rows = torch.tensor([3, 1])
        width = slots.shape[1]
        self.req_to_token[self.rows, :width] = slots.int()
        self.pool = Pool(2, size, size, sliding)
        self.runner = SimpleNamespace(
            use_mla_backend=False,
            page_size=PAGE,
            attention_chunk_size=CHUNK,
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
        )
        self.backend = ServedAttention(self.runner, deterministic)
        self.lens = [0, 0]
        self.keys: list[Tensor] = [torch.empty(0, 2, size)] * 2
        self.values = list(self.keys)

    def step(
        self, counts: list[int], layer: Any, padding: int = 0,
        tokens: Sequence[Tensor] | None = None, **kwargs: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Serve new tokens of both requests. Returns the output and the queries of each.

        `tokens`: queries, keys and values of theirs; default: random ones.
        """
        self.lens = [a + b for a, b in zip(self.lens, counts, strict=True)]
        decode = counts == [1, 1]
        slots = [
            self.req_to_token[row, n - c : n]
            for row, n, c in zip(self.rows.tolist(), self.lens, counts, strict=True)
        ]
        batch = SimpleNamespace(
            forward_mode=Mode("DECODE" if decode else "EXTEND"),
            seq_lens_cpu=torch.tensor(self.lens), seq_lens=torch.tensor(self.lens),
            extend_seq_lens_cpu=None if decode else counts,
            req_pool_indices=self.rows, out_cache_loc=torch.cat(slots).long(), spec_info=None,
        )  # fmt: skip
        total = sum(counts) + padding
        if tokens is None:
            q = torch.randn(total, layer.tp_q_head_num * layer.qk_head_dim)
            k, v = (torch.randn(total, 2, layer.qk_head_dim) for _ in range(2))
        else:
            q, k, v = (x if x is tokens[0] else x.unflatten(1, (2, -1)) for x in tokens)
        for row, (a, b) in enumerate(
            zip(k.split([*counts, padding]), v.split([*counts, padding]), strict=True)
        ):
            if row < 2:
                self.keys[row] = torch.cat([self.keys[row], a])
                self.values[row] = torch.cat([self.values[row], b])
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        out = forward(q, k, v, layer, batch, save_kv_cache=True, **kwargs)
        return out, q.unflatten(1, (layer.tp_q_head_num, -1)).split([*counts, padding])


def formula(q: Tensor, k: Tensor, v: Tensor, layer: Any, sinks: Tensor | None = None) -> Tensor:
    """One request, in float64, as SGLang's torch_native backend defines it."""
    seen = in_window(len(q), len(k), layer.sliding_window_size, 0)
    if layer.use_irope:  # Llama 4's layers of local attention
        chunk = torch.arange(len(k)) // CHUNK
        seen = seen & (chunk == chunk[len(k) - len(q) :, None])
    return attend(q, k, v, seen, scale=layer.scaling, cap=layer.logit_cap, sinks=sinks)[0]


CASES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "plain": ({}, False, False),
    "soft cap": ({"logit_cap": 5.0}, False, False),
    "window": ({"sliding_window_size": 6}, False, False),
    "window, a pool of its own": ({"sliding_window_size": 6}, True, False),
    "chunks": ({"use_irope": True}, False, False),
    "chunks, a pool of their own": ({"use_irope": True}, True, False),
    "sinks": ({}, False, True),
}


@pytest.mark.parametrize("name", CASES)
def test_prefill_chunks_and_decodes(name: str) -> None:
    fields, two_pools, sinks = CASES[name]
    served, its = Served(two_pools), layer(**fields)
    kwargs = {"sinks": torch.randn(4)} if sinks else {}
    for counts, padding in (([5, 9], 0), ([7, 3], 2), ([1, 1], 0), ([1, 4], 0), ([1, 1], 0)):
        out, queries = served.step(counts, its, padding, **kwargs)
        found = out.unflatten(1, (4, -1)).split([*counts, padding])
        for row in range(2):
            wanted = formula(queries[row], served.keys[row], served.values[row], its, **kwargs)
            torch.testing.assert_close(found[row].double(), wanted, rtol=1e-5, atol=1e-5)
        assert not found[2].any()
    written = ~served.pool.key.isnan().any(-1).any(-1)
    rows = zip(served.rows.tolist(), served.lens, strict=True)
    slots = torch.cat([served.req_to_token[row, :n] for row, n in rows]).long()
    if two_pools:
        slots = served.pool.translate_loc_from_full_to_swa(slots)
    assert written.nonzero().flatten().equal(slots.sort().values), "another slot was written"


def test_an_encoder_s_tokens_attend_to_their_step_alone() -> None:
    """Both ways, and nothing is written to the pool: what an earlier step left there is another's."""
    served, its = Served(), layer(attn_type=SimpleNamespace(value="encoder_only"))
    served.step([4, 6], layer())
    before = served.pool.key.clone()
    out, queries = served.step([5, 9], its)
    for row, (found, query) in enumerate(zip(out.split([5, 9, 0]), queries, strict=True)):
        if row < 2:
            own = (held[row][-len(query) :] for held in (served.keys, served.values))
            wanted, _ = attend(query, *own, scale=its.scaling)
            torch.testing.assert_close(
                found.unflatten(1, (4, -1)).double(), wanted, rtol=1e-5, atol=1e-5
            )
    assert torch.equal(served.pool.key.nan_to_num(9.0), before.nan_to_num(9.0))


def test_models_find_the_pools_on_the_backend() -> None:
    """As SGLang's `forward_context` asks for them: Qwen3-MoE does before it turns queries and keys."""
    served = Served()
    assert served.backend.token_to_kv_pool is served.runner.token_to_kv_pool
    assert served.backend.req_to_token_pool is served.runner.req_to_token_pool


def test_deterministic_inference_gives_a_token_its_bits_in_any_steps() -> None:
    """Two requests of 31 and 20 tokens, as prompts and in steps; without the mode they differ."""
    torch.manual_seed(1)
    its, totals = layer(), (31, 20)
    tokens = [[torch.randn(n, heads * 16) for heads in (4, 2, 2)] for n in totals]

    def outputs(deterministic: bool, steps: list[list[int]]) -> list[Tensor]:
        served = Served(deterministic=deterministic)
        found: list[list[Tensor]] = [[], []]
        for counts in steps:
            at = list(served.lens)
            pieces = [
                [x[a : a + n] for x in own]
                for own, a, n in zip(tokens, at, counts, strict=True)
            ]  # fmt: skip
            out, _ = served.step(
                counts, its, tokens=[torch.cat(x) for x in zip(*pieces, strict=True)]
            )
            for rows, own in zip(out.split(counts), found, strict=True):
                own.append(rows)
        return [torch.cat(own) for own in found]

    ways = [[[30, 19], [1, 1]], [[1, 7], [4, 1], [1, 1], [17, 2], [8, 9]], [list(totals)]]
    try:
        same = [outputs(True, steps) for steps in ways]
    except SelectionError:
        pytest.skip("no backend here gives this level")
    assert all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other, strict=True))
    free = [outputs(False, steps) for steps in ways]
    assert any(not torch.equal(a, b) for a, b in zip(free[0], free[1], strict=True))


def test_polyattn_why_tells_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(running, "_written", {})
    Served(False).step([5, 9], layer(logit_cap=7.0), 0)  # a group that no other test has loaded
    (process,) = running.running()
    assert "polyattn_sglang" in process.integrations and process.decisions


def test_a_layer_that_shares_anothers_cache() -> None:
    served, its = Served(), layer()
    served.step([5, 9], its)
    before = served.pool.key.clone()
    q = torch.randn(14, 64)
    batch: Any = None
    out = served.backend.forward_extend(q, None, None, its, batch, save_kv_cache=False)  # type: ignore[arg-type]
    wanted = formula(q[:5].unflatten(1, (4, -1)), served.keys[0], served.values[0], its)
    torch.testing.assert_close(out[:5].unflatten(1, (4, -1)).double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(served.pool.key.nan_to_num(9.0), before.nan_to_num(9.0))


def test_what_is_refused() -> None:
    served = Served()
    for its, kwargs, why in (
        (layer(is_cross_attention=True), {}, "isn't served"),
        (layer(logit_cap=1.0, logit_capping_method="sigmoid"), {}, "'tanh' is served"),
        (layer(xai_temperature_len=1024), {}, "xai_temperature_len=1024 scales"),
        (layer(), {"k_rope": torch.ones(1)}, "k_rope is given"),
        (layer(), {"topk_indices": torch.ones(1)}, "topk_indices is given"),
        (
            layer(attn_type=SimpleNamespace(value="decoder_bidirectional")),
            {},
            "decoder_bidirectional",
        ),
    ):
        with pytest.raises(PolyattnError, match=why):
            served.step([2, 2], its, **kwargs)
    served.pool.key = served.pool.key.to(torch.float8_e4m3fn)
    with pytest.raises(PolyattnError, match="--kv-cache-dtype auto"):
        served.step([2, 2], layer())
    verify = SimpleNamespace(forward_mode=Mode("TARGET_VERIFY"), req_pool_indices=None)
    with pytest.raises(PolyattnError, match="speculative"):
        served.backend.init_forward_metadata(verify)
    with pytest.raises(PolyattnError, match="--disable-cuda-graph"):
        served.backend.init_cuda_graph_state(1, 1)
    with pytest.raises(PolyattnError, match="MLA"):
        ServedAttention(SimpleNamespace(use_mla_backend=True))


def test_a_model_of_sparse_layers_is_refused_by_name_before_the_engine_is_up() -> None:
    """Its layers would be refused at the first step; a dense model, and one nobody reads, go on."""
    configs = pytest.importorskip("transformers").AutoConfig
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}

    def runner(config: Any) -> Any:
        return SimpleNamespace(
            use_mla_backend=False, model_config=SimpleNamespace(hf_config=config), page_size=16,
            req_to_token_pool=None, token_to_kv_pool=None,
        )  # fmt: skip

    with pytest.raises(
        PolyattnError, match=r"minimax_m3_vl: its layers are sparse \(1 of 2\).*--attention-backend"
    ):
        ServedAttention(runner(configs.for_model("minimax_m3_vl", text_config=layers)))
    unread = SimpleNamespace(model_type="new", to_dict=lambda: {"model_type": "new"})
    for other in (configs.for_model("llama"), unread):
        assert ServedAttention(runner(other)).page == 16


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Modules with what `register` imports of SGLang."""

    class AttentionBackend:
        pass

    choices: list[str] = ["triton"]
    deterministic: list[str] = []
    registered: dict[str, Any] = {}

    def register_attention_backend(name: str) -> Any:
        return lambda function: registered.__setitem__(name, function)

    contents: dict[str, dict[str, Any]] = {
        "arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": choices, "add_attention_backend_choices": choices.extend,
            "add_deterministic_attention_backend_choices": deterministic.extend,
            "add_radix_supported_deterministic_attention_backend_choices": deterministic.extend,
        },
        "layers.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "runtime_context": {
            "get_exec": lambda: SimpleNamespace(
                deterministic=SimpleNamespace(enable_deterministic_inference=True)
            )
        },
    }  # fmt: skip
    for path, names in contents.items():
        whole = f"sglang.srt.{path}"
        parts = whole.split(".")
        for end in range(1, len(parts)):
            package = ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        module = ModuleType(whole)
        module.__dict__.update(names)
        monkeypatch.setitem(sys.modules, whole, module)
    yield {
        "choices": choices, "deterministic": deterministic, "registered": registered,
        "base": AttentionBackend,
    }  # fmt: skip


def test_the_plugin_registers_itself(host: dict[str, Any]) -> None:
    (found,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "polyattn"]
    found.load()()
    found.load()()
    assert host["choices"] == ["triton", "polyattn"]
    assert host["deterministic"] == ["polyattn"] * 2
    runner = SimpleNamespace(
        use_mla_backend=False,
        page_size=1,
        token_to_kv_pool=Pool(2, 16, 16, False),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
    )
    backend = host["registered"]["polyattn"](runner)
    assert isinstance(backend, host["base"])
    assert isinstance(backend, ServedAttention) and backend.deterministic


def test_methods_have_the_recorded_signatures() -> None:
    for name in (
        "forward_decode",
        "forward_extend",
        "init_forward_metadata",
        "init_cuda_graph_state",
    ):
        recorded = RECORDED[f"AttentionBackend.{name}"]
        signature = inspect.signature(getattr(ServedAttention, name))
        names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert names[1:] == recorded["positional"], name
    for name, stand_in in (
        ("MHATokenToKVPool.get_key_buffer", Pool.get_key_buffer),
        ("MHATokenToKVPool.get_value_buffer", Pool.get_value_buffer),
        ("SWAKVPool.translate_loc_from_full_to_swa", Pool.translate_loc_from_full_to_swa),
    ):
        assert list(inspect.signature(stand_in).parameters)[1:] == RECORDED[name]["positional"]
    given = set(RECORDED["RadixAttention.__init__"]["positional"])
    assert {"logit_cap", "logit_capping_method", "sliding_window_size", "attn_type"} <= given
    assert RECORDED["register_attention_backend"]["positional"] == ["name"]
    assert polyattn_sglang.create is not None
