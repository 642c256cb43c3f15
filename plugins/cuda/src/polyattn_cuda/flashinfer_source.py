"""A trace's source in CUDA: a variant's declaration for FlashInfer's JIT.

One transform of logits holds the functions and the masks: FlashInfer asks its own mask of logits on
border tiles alone. Hidden logits become its "infinity" (5e4), so that a row that sees nothing has output
0. Inputs are tensors of the module's, their sizes and strides its numbers: a kernel's own parameters,
which cost no load. What is one number for a sequence is computed before its tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyattn.kernel import Trace, reciprocal

from polyattn_cuda.trace_bounds import Bounds, bounds_of

NAME = "PolyattnVariant"
SEQUENCES = "polyattn_seq_index"
SCALE, SOFT_CAP = "polyattn_scale", "polyattn_soft_cap"
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
    "minimum": "least<float>", "maximum": "most<float>",
}  # fmt: skip
ENDLESS = frozenset({"log", "log2", "truediv", "load", "exp", "exp2", "mul", "rsqrt", "written"})
"""Operations on floats whose result may be infinite though their operands are not."""
HELPERS = """
  // The address of an element: negative indices count from the end, what lies outside is the nearest.
  template <typename I> static __device__ int64_t at(I index, int64_t size, int64_t stride) {
    return inside<I>(index < 0 ? I(index + I(size)) : index, size, stride);
  }
  template <typename I> static __device__ int64_t inside(I index, int64_t size, int64_t stride) {
    index = index < I(size) ? index : I(size - 1);
    return int64_t(index > 0 ? index : 0) * stride;
  }
  // NaN stays NaN, as torch has it; CUDA's own drop it.
  template <typename T> static __device__ T least(T a, T b) { return a < b || a != a ? a : b; }
  template <typename T> static __device__ T most(T a, T b) { return a > b || a != a ? a : b; }
  template <typename I> static __device__ I floor_div(I a, I b) {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  }
  template <typename I> static __device__ I floor_mod(I a, I b) {
    return a - floor_div<I>(a, b) * b;
  }
"""
WRITTEN = """
  template <typename T, int N>
  struct Input {
    const T* data;
    int64_t sizes[N], strides[N];
    template <typename... Indices> __device__ T operator()(Indices... indices) const {
      int64_t place = 0, dim = 0;
      ((place += at<int64_t>(indices, sizes[dim], strides[dim]), ++dim), ...);
      return data[place];
    }
  };
  struct Written {
TEXT
  };
"""
"""Hand-written source, whose tensor inputs are called with their indices."""
FA2 = """
struct PolyattnVariant : AttentionVariantBase {
  static constexpr bool use_softmax = SOFTMAX;
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
MEMBERS
  template <typename Params>
  __device__ PolyattnVariant(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
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
  __device__ PolyattnVariant(const MainloopParams& params, const BlockCoord& block_coord) {
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
    const int32_t h = qo_head_idx;
    const int32_t q = int32_t(qo_idx) + int32_t(kv_len) - int32_t(qo_len);
    const int32_t k = kv_idx;
BODY
  })
"""
AS_IT_IS = """
  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return output;
  })
"""


@dataclass(frozen=True)
class Declared:
    """A declaration's content: the functions, and the layer's properties that it depends on.

    `softmax`: whether weights are one of the scores. `capped`, `windowed`: whether the layer has a soft
    cap, a window. `kernels`: `"fa2"`, or `"fa3"` where scores are changed and none are hidden.
    """

    trace: Trace
    softmax: bool
    capped: bool
    windowed: bool
    kernels: str

    @property
    def tensors(self) -> tuple[list[str], list[str]]:
        """Names and C++ types of the tensors that a module is given."""
        inputs = self.trace.inputs
        kinds = [ELEMENTS[declared.dtype] for declared in inputs.values()]
        return [SEQUENCES, *map(tensor_name, inputs)], ["int32_t", *kinds]

    @property
    def numbers(self) -> tuple[list[str], list[str]]:
        """Names and C++ types of the numbers: scale, soft cap, then each size and stride."""
        names = [
            number_name(what, name, dim)
            for name, declared in self.trace.inputs.items()
            for dim in range(len(declared.dims))
            for what in ("size", "stride")
        ]
        return [SCALE, SOFT_CAP, *names], ["double", "double", *["int64_t"] * len(names)]

    def source(self) -> str:
        """Return the declaration."""
        writer = _Writer(self.trace)
        fa3 = self.kernels == "fa3"
        head = FA3.replace("UPDATER", UPDATERS[self.softmax])
        if not fa3:
            head = FA2.replace("SOFTMAX", str(self.softmax).lower())
        lines = [self._scaled(), *writer.lines()]
        if self.softmax and not (fa3 and writer.finite()):
            # A finite one: what FlashInfer subtracts from itself.
            lines.append("s = s > -math::inf ? s : (s == s ? -math::inf : s);")
        if not fa3:
            lines += self._hiding(writer)
        members, once = writer.members()
        if self.capped:
            members += "  float scale_over_cap, soft_cap;\n"
            once += f"    scale_over_cap = float(PARAMS.{SCALE} / PARAMS.{SOFT_CAP});\n"
            once += f"    soft_cap = float(PARAMS.{SOFT_CAP});\n"
        else:
            members += "  float scale;\n"
            once += f"    scale = float(PARAMS.{SCALE});\n"
        body = "\n".join(f"    {line}" for line in [*lines, "return s;"])
        head = head.replace("MEMBERS", members).replace("ONCE", once)
        ending = AS_IT_IS if not fa3 and not self.softmax else ""
        written = self.trace.written
        by_hand = "" if written is None else WRITTEN.replace("TEXT", written)
        whole = f"{head}{HELPERS}{by_hand}{TRANSFORM.replace('BODY', body)}{ending}}};\n"
        return whole.replace("PARAMS", "params.additional_params" if fa3 else "params")

    def _scaled(self) -> str:
        if self.capped:
            return "float s = soft_cap * tanhf(float(logits) * scale_over_cap);"
        return "float s = float(logits) * scale;"

    def _hiding(self, writer: _Writer) -> list[str]:
        """Return what hides scores: the masks, and the layer's window."""
        hidden = "-math::inf" if self.softmax else "0.f"
        lines = []
        if self.trace.mask is not None:
            lines.append(f"s = {writer.ref(self.trace.mask, 'bool')} ? s : {hidden};")
        if self.windowed:
            lines.append(f"s = k + int32_t(window_left) >= q ? s : {hidden};")
        return lines


def tensor_name(name: str) -> str:
    """Return what an input is called in a module."""
    return f"polyattn_input_{name}"


def number_name(what: str, name: str, dim: int) -> str:
    """Return what the size or the stride of an input's dimension is called in a module."""
    return f"polyattn_{what}{dim}_{name}"


class _Writer:
    """Writes a trace as one function of C++."""

    def __init__(self, traced: Trace):
        self.trace, self.nodes = traced, traced.nodes
        self.bounds = bounds_of(traced)
        self.used = self._used()
        # What is one number for a sequence.
        self.once: list[bool] = []
        for node in self.nodes:
            mine = node.op != "place" or node.what == "b"
            self.once.append(mine and all(self.once[a] for a in node.args))

    def _used(self) -> list[int]:
        """Return the operations behind the results, without constants, which are inlined."""
        numbers = {n for n in (self.trace.score, self.trace.mask) if n is not None}
        for number in reversed(range(len(self.nodes))):
            if number in numbers:
                numbers.update(self.nodes[number].args)
        return sorted(n for n in numbers if self.nodes[n].op != "constant")

    def finite(self) -> bool:
        """Whether a finite score can't become an infinite one."""
        used = [node for node in self.nodes if node.kind == "float"]
        constants = [node.what for node in used if node.op == "constant"]
        return all(math.isfinite(c) for c in constants) and not any(n.op in ENDLESS for n in used)

    def members(self) -> tuple[str, str]:
        """Return members for what is one number for a sequence, and what computes them."""
        numbers = [i for i in self.used if self.once[i]]
        if not numbers:
            return "", ""
        declared = "".join(f"  {self._type(i)} x{i};\n" for i in numbers)
        lines = [f"x{i} = {self._expression(i)};" for i in numbers]
        if any(self.nodes[i].op == "place" for i in numbers):
            lines.insert(0, f"const int32_t b = __ldg(PARAMS.{SEQUENCES} + batch_idx);")
        return declared, "".join(f"    {line}\n" for line in lines)

    def lines(self) -> list[str]:
        """Return what computes the new score."""
        code = [
            f"const {self._type(i)} x{i} = {self._expression(i)};"
            for i in self.used
            if not self.once[i]
        ]
        if self.trace.score is not None:
            code.append(f"s = {self.ref(self.trace.score, 'float')};")
        return code

    def ref(self, number: int, kind: str) -> str:
        """Return an operand as a `kind`."""
        node = self.nodes[number]
        name = f"x{number}"
        if node.op == "constant":
            name = _literal(node.what, self._short(number))
        if node.kind == kind:
            return name
        return f"({name} != 0)" if kind == "bool" else f"{TYPES[kind]}({name})"

    def _short(self, number: int) -> bool:
        bounds = self.bounds[number]
        return bounds is not None and bounds.short

    def _type(self, number: int) -> str:
        return "int32_t" if self._short(number) else TYPES[self.nodes[number].kind]

    def _expression(self, number: int) -> str:
        node = self.nodes[number]
        op, args = node.op, node.args
        if op == "place":
            return PLACES[node.what]
        if op == "size":
            name, dim = node.what
            return f"PARAMS.{number_name('size', name, dim)}"
        if op == "load":
            return self._load(node)
        if op == "written":
            called, names = node.what
            operands = [*(f"x{a}" for a in args), *map(self._given, names)]
            return f"Written::{called}({', '.join(operands)})"
        kinds = {self.nodes[a].kind for a in args}
        if op in ("lt", "le", "gt", "ge", "eq", "ne"):
            kind = next(k for k in ("float", "int", "bool") if k in kinds)
            return f"{self.ref(args[0], kind)} {INFIX[op]} {self.ref(args[1], kind)}"
        if op.startswith("to_"):
            return self.ref(args[0], op.removeprefix("to_"))
        if op == "where":
            yes, no = (self.ref(a, node.kind) for a in args[1:])
            return f"{self.ref(args[0], 'bool')} ? {yes} : {no}"
        if node.kind == "int":
            return self._integer(number)
        operands = [self.ref(a, node.kind) for a in args]
        if (factor := reciprocal(self.trace, number)) is not None:
            return f"{operands[0]} * float({factor!r})"
        return _float_or_truth(op, node.kind, operands)

    def _integer(self, number: int) -> str:
        """An operation on integers, in 32 bits where operands and result fit them."""
        node = self.nodes[number]
        short = self._short(number) and all(
            self._short(a) or self.nodes[a].kind == "bool" for a in node.args
        )
        kind = "int32_t" if short else "int64_t"
        args = [f"{kind}({self.ref(a, self.nodes[a].kind)})" for a in node.args]
        op = node.op
        if op in INFIX:
            return f"{args[0]} {INFIX[op]} {args[1]}"
        if op in ("neg", "not"):
            return f"{'-' if op == 'neg' else '~'}{args[0]}"
        if op in ("floor", "ceil"):
            return args[0]
        if op == "abs":
            return f"most<{kind}>({args[0]}, -{args[0]})"
        bounds = [self.bounds[a] or Bounds(0, 1) for a in node.args]
        if op in ("floordiv", "mod") and bounds[0].natural and bounds[1].low > 0:
            return f"{args[0]} {'/' if op == 'floordiv' else '%'} {args[1]}"
        call = {"minimum": "least", "maximum": "most", "floordiv": "floor_div", "mod": "floor_mod"}[
            op
        ]
        return f"{call}<{kind}>({', '.join(args)})"

    def _given(self, name: str) -> str:
        """An input as what is written by hand takes it: a number, or what is called with indices."""
        declared, where = self.trace.inputs[name], f"PARAMS.{tensor_name(name)}"
        if not declared.dims:
            return f"*{where}"
        sizes, strides = (
            ", ".join(f"PARAMS.{number_name(w, name, d)}" for d in range(len(declared.dims)))
            for w in ("size", "stride")
        )
        kind = f"Input<{ELEMENTS[declared.dtype]}, {len(declared.dims)}>"
        return f"{kind}{{{where}, {{{sizes}}}, {{{strides}}}}}"

    def _load(self, node: Any) -> str:
        name = node.what
        places = []
        for dim, number in enumerate(node.args):
            bounds = self.bounds[number]
            call = "inside" if bounds is not None and bounds.natural else "at"
            kind = "int32_t" if self._short(number) else "int64_t"
            size, stride = (f"PARAMS.{number_name(w, name, dim)}" for w in ("size", "stride"))
            places.append(f"{call}<{kind}>({self.ref(number, 'int')}, {size}, {stride})")
        where = f"PARAMS.{tensor_name(name)}"
        return f"__ldg({' + '.join([where, *places])})"


def _literal(value: Any, short: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{'int32_t' if short else 'int64_t'}({value})"
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"float({value!r})"


def _float_or_truth(op: str, kind: str, args: list[str]) -> str:
    """An operation on floats or on truths."""
    if op in INFIX:
        return f"{args[0]} {INFIX[op]} {args[1]}"
    if op == "neg":
        return f"-{args[0]}"
    if op == "not":
        return f"!{args[0]}"
    if op == "sigmoid":  # two special functions and a sum: a division would take four more
        return f"math::ptx_rcp(1.f + math::ptx_exp2({args[0]} * -math::log2e))"
    if kind == "bool":
        return f"{args[0]} {'&' if op == 'minimum' else '|'} {args[1]}"
    if op in FLOATS:
        return f"{FLOATS[op]}({', '.join(args)})"
    quotient = f"floorf({args[0]} / {args[1]})"
    return quotient if op == "floordiv" else f"{args[0]} - {quotient} * {args[1]}"
