"""What is a trace's source in CUDA? A variant's declaration, as FlashInfer's JIT takes it.

One transform of logits holds the functions and the masks: FlashInfer asks its own mask of logits on
border tiles alone. Hidden logits become its "infinity" (5e4), so that a row that sees nothing has output
0. Inputs come as a table of addresses, sizes and strides.
"""

from __future__ import annotations

import math
from typing import Any

from polyattn.kernel import Trace

NAME = "PolyattnVariant"
TABLE = "polyattn_inputs"
SCALARS = ("polyattn_scale", "polyattn_soft_cap")
TYPES = {"float": "float", "int": "int64_t", "bool": "bool"}
ELEMENTS = {"float32": "float", "int32": "int32_t", "int64": "int64_t", "bool": "uint8_t"}
PLACES = {"score": "s", "b": "b", "h": "h", "q_idx": "q", "kv_idx": "k"}
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
FLOATS = {
    "exp": "expf", "exp2": "exp2f", "log": "logf", "log2": "log2f", "sqrt": "sqrtf", "rsqrt": "rsqrtf",
    "sin": "sinf", "cos": "cosf", "tanh": "tanhf", "abs": "fabsf", "floor": "floorf", "ceil": "ceilf",
    "minimum": "fminf", "maximum": "fmaxf",
}  # fmt: skip
HELPERS = """
  static __device__ __host__ int64_t at(int64_t index, int64_t size, int64_t stride) {
    index = index < 0 ? index + size : index;
    index = index < size ? index : size - 1;
    return (index > 0 ? index : 0) * stride;
  }
  static __device__ __host__ int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  static __device__ __host__ int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
  static __device__ __host__ int64_t floor_div(int64_t a, int64_t b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  }
  static __device__ __host__ int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
"""
WRITTEN = """
  template <typename T>
  struct Input {
    const int64_t* t;
    template <typename... Indices>
    __device__ __host__ T operator()(Indices... indices) const {
      int64_t place = 0, dim = 0;
      ((place += at(indices, t[1 + 2 * dim], t[2 + 2 * dim]), ++dim), ...);
      return reinterpret_cast<const T*>(t[0])[place];
    }
  };
  struct Written {
TEXT
  };
"""
"""What is written by hand, and what its inputs that are tensors come as: called with their indices."""
FA2 = """
struct PolyattnVariant : AttentionVariantBase {
  static constexpr bool use_softmax = SOFTMAX;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
MEMBERS
  template <typename Params>
  __device__ __host__ PolyattnVariant(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? params.window_left : kv_len;
    sm_scale_log2 = math::log2e;
ONCE  }
"""
FA3 = """
struct PolyattnVariant : AttentionVariantBase {
  uint32_t qo_len, kv_len;
MEMBERS
  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ PolyattnVariant(const MainloopParams& params, const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, queries, keys, batch_idx] =
        block_coord;
    qo_len = queries;
    kv_len = keys;
ONCE  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() { return UPDATER; }
"""
UPDATERS = {
    True: "OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(math::log2e)",
    False: "DefaultUpdater<NUM_ROWS_PER_THREAD>()",
}
TRANSFORM = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int64_t* t = reinterpret_cast<const int64_t*>(PARAMS.polyattn_inputs);
    const int64_t h = qo_head_idx;
    const int64_t q = int64_t(qo_idx) + int64_t(kv_len) - int64_t(qo_len);
    const int64_t k = kv_idx;
    float s = float(logits) * float(PARAMS.polyattn_scale);
    if (PARAMS.polyattn_soft_cap > 0) {
      s = float(PARAMS.polyattn_soft_cap) * tanhf(s / float(PARAMS.polyattn_soft_cap));
    }
BODY
  })
"""
AS_IT_IS = """
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return output;
  })
"""


def declaration(traced: Trace, softmax: bool, kernels: str) -> str:
    """Return the declaration of a trace's functions. `softmax`: whether weights are one of them.

    `kernels`: `"fa2"`, or `"fa3"` where scores are changed and none are hidden.
    """
    writer = _Writer(traced)
    if kernels == "fa3":
        head = FA3.replace("UPDATER", UPDATERS[softmax])
        lines, params = writer.lines(), "params.additional_params"
    else:
        head = FA2.replace("SOFTMAX", str(softmax).lower())
        lines, params = [*writer.lines(), *writer.hiding(softmax)], "params"
    body = "\n".join(f"    {line}" for line in [*lines, "return s;"])
    members, once = writer.members()
    head = head.replace("MEMBERS", members).replace("ONCE", once)
    ending = AS_IT_IS if kernels == "fa2" and not softmax else ""
    written = "" if traced.written is None else WRITTEN.replace("TEXT", traced.written)
    whole = f"{head}{HELPERS}{written}{TRANSFORM.replace('BODY', body)}{ending}}};\n"
    return whole.replace("PARAMS", params)


class _Writer:
    """Writes a trace as one function of C++."""

    def __init__(self, traced: Trace):
        self.trace, self.nodes = traced, traced.nodes
        self.first: dict[str, int] = {}
        at = 1  # behind the sequences' numbers
        for name, declared in traced.inputs.items():
            self.first[name] = at
            at += 1 + 2 * len(declared.dims)
        # What is one number for a sequence.
        self.once: list[bool] = []
        for node in self.nodes:
            mine = node.op != "place" or node.what == "b"
            self.once.append(mine and all(self.once[a] for a in node.args))

    def members(self) -> tuple[str, str]:
        """Return members for what is one number for a sequence, and what computes them."""
        numbers = [i for i, once in enumerate(self.once) if once]
        if not numbers:
            return "", ""
        declared = "".join(f"  {TYPES[self.nodes[i].kind]} x{i};\n" for i in numbers)
        lines = [
            "const int64_t* t = reinterpret_cast<const int64_t*>(PARAMS.polyattn_inputs);",
            "const int64_t b = reinterpret_cast<const int32_t*>(t[0])[batch_idx];",
            *(f"x{i} = {self._expression(i)};" for i in numbers),
        ]
        return declared, "".join(f"    {line}\n" for line in lines)

    def lines(self) -> list[str]:
        """Return what computes the new score."""
        found = [
            f"const {TYPES[node.kind]} x{i} = {self._expression(i)};"
            for i, node in enumerate(self.nodes)
            if not self.once[i]
        ]
        if self.trace.score is not None:
            found.append(f"s = {self._ref(self.trace.score, 'float')};")
        return found

    def hiding(self, softmax: bool) -> list[str]:
        """Return what hides scores: the masks, and the layer's window."""
        hidden = "-math::inf" if softmax else "0.f"
        found = []
        if softmax:  # a finite one: what FlashInfer subtracts from itself
            found.append("s = s > -math::inf ? s : (s == s ? -math::inf : s);")
        if self.trace.mask is not None:
            found.append(f"s = {self._ref(self.trace.mask, 'bool')} ? s : {hidden};")
        return [*found, f"s = k + int64_t(window_left) >= q ? s : {hidden};"]

    def _expression(self, number: int) -> str:
        node = self.nodes[number]
        op, args = node.op, node.args
        if op == "place":
            return PLACES[node.what]
        if op == "constant":
            return _literal(node.what)
        if op == "size":
            name, dim = node.what
            return f"t[{self.first[name] + 1 + 2 * dim}]"
        if op == "load":
            return self._load(node)
        if op == "written":
            called, names = node.what
            given = [*(f"x{a}" for a in args), *map(self._given, names)]
            return f"Written::{called}({', '.join(given)})"
        kinds = {self.nodes[a].kind for a in args}
        if op in ("lt", "le", "gt", "ge", "eq", "ne"):
            kind = next(k for k in ("float", "int", "bool") if k in kinds)
            return f"{self._ref(args[0], kind)} {INFIX[op]} {self._ref(args[1], kind)}"
        if op.startswith("to_"):
            return self._ref(args[0], op.removeprefix("to_"))
        if op == "where":
            yes, no = (self._ref(a, node.kind) for a in args[1:])
            return f"{self._ref(args[0], 'bool')} ? {yes} : {no}"
        return _computed(op, node.kind, [self._ref(a, node.kind) for a in args])

    def _given(self, name: str) -> str:
        """An input as what is written by hand takes it: a number, or where a tensor lies."""
        declared, first = self.trace.inputs[name], self.first[name]
        element = ELEMENTS[declared.dtype]
        if declared.dims:
            return f"Input<{element}>{{t + {first}}}"
        return f"*reinterpret_cast<const {element}*>(t[{first}])"

    def _load(self, node: Any) -> str:
        first = self.first[node.what]
        places = [
            f"at({self._ref(a, 'int')}, t[{first + 1 + 2 * d}], t[{first + 2 + 2 * d}])"
            for d, a in enumerate(node.args)
        ]
        element = ELEMENTS[self.trace.inputs[node.what].dtype]
        return f"reinterpret_cast<const {element}*>(t[{first}])[{' + '.join(places) or '0'}]"

    def _ref(self, number: int, kind: str) -> str:
        if self.nodes[number].kind == kind:
            return f"x{number}"
        return f"(x{number} != 0)" if kind == "bool" else f"{TYPES[kind]}(x{number})"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"int64_t({value})"
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"float({value!r})"


def _computed(op: str, kind: str, args: list[str]) -> str:
    """An operation on operands of its result's kind."""
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    if op == "neg":
        return f"-{args[0]}"
    if op == "not":
        return f"!{args[0]}" if kind == "bool" else f"~{args[0]}"
    if op == "sigmoid":
        return f"1.f / (1.f + expf(-{args[0]}))"
    if kind == "float" and op in FLOATS:
        return f"{FLOATS[op]}({', '.join(args)})"
    if kind == "float":
        quotient = f"floorf({args[0]} / {args[1]})"
        return quotient if op == "floordiv" else f"{args[0]} - {quotient} * {args[1]}"
    if op in ("floor", "ceil"):
        return args[0]
    if op == "abs":
        return f"most({args[0]}, -{args[0]})"
    call = {"minimum": "least", "maximum": "most", "floordiv": "floor_div", "mod": "floor_mod"}[op]
    return f"{call}({', '.join(args)})"
