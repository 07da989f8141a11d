"""FLOPs and bytes of one op call, and a mode that adds them up over a step.

Owns the prices by which ops are kept or replayed and by which MFU is counted. Knows ops, no models. One multiply-add is
two FLOPs; only contractions count (matmuls, convolutions, attention), as everywhere in the field: elementwise work is
bandwidth, which `op_bytes_moved` prices. Causal attention counts half: see CAUSAL_CONVENTION.

    with FlopCounter() as counter: loss = model(**batch).loss; loss.backward()
    counter.total, counter.by_op
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ckpt.flops_attention import CAUSAL_CONVENTION, attention_layout, flex_attention_flops, fused_attention_flops
from ckpt.tensors import flat_tensors, no_shape_propagation

__all__ = ["CAUSAL_CONVENTION", "FlopCounter", "op_bytes_moved", "op_flops"]

aten = torch.ops.aten
Formula = Callable[[Any, tuple, Mapping[str, Any], Any], int]


def op_flops(func: Any, args: tuple, kwargs: Mapping[str, Any] | None, out: Any) -> int:
    """Return the FLOPs of one op call, from the shapes of its arguments and results.

    func: an OpOverload or higher-order op; out: what it returned. Works on real and fake tensors. 0 for what is no
    contraction, and for kernels that nobody gave a formula (torch.utils.flop_counter.register_flop_formula is heeded).
    """
    formula = _formula(func)
    return 0 if formula is None else int(formula(func, args, kwargs or {}, out))


class FlopCounter(TorchDispatchMode):
    """Add up the FLOPs of everything run inside.

    total: FLOPs so far. by_op: the same by op name. Replayed ops count as often as they run, so a step without
    checkpointing gives model FLOPs (MFU) and a checkpointed one hardware FLOPs (HFU). Of sharded tensors this rank's
    share counts.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self._stack = ExitStack()

    def __enter__(self):
        self._stack.enter_context(no_shape_propagation())
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self._stack.close()

    @property
    def total(self) -> int:
        """FLOPs so far."""
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor unwraps itself: its local ops come back here
        kwargs = kwargs or {}
        if _formula(func) is None and _is_composite(func):  # inference mode hands over linear and matmul whole
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if flops := op_flops(func, args, kwargs, out):
            self.by_op[str(getattr(func, "overloadpacket", func))] += flops
        return out


def op_bytes_moved(func: Any, args: tuple, out: Any, kwargs: Mapping[str, Any] | None = None) -> int:
    """Return the bytes that one op call reads and writes at least: each input and each result once.

    0 for views and for allocations without a value. Repeated (expanded) elements count once; of a table that is looked
    up only the rows taken count. A kernel that makes several passes moves more: this is the roofline's lower bound.
    """
    if _makes_no_traffic(func):
        return 0
    kwargs, made = kwargs or {}, flat_tensors(out)
    packet = getattr(func, "overloadpacket", func)
    schema = getattr(func, "_schema", None)
    if schema is not None and schema.is_mutable:  # the results are the arguments written
        return _bytes_in_place(packet, schema, args, kwargs)
    written = sum(map(_dense_bytes, made))
    if packet in _FILLS:
        return written
    table, *rest = [*flat_tensors(args), *flat_tensors(list(kwargs.values()))] or [None]
    if table is None:
        return written
    looked_up = min(_dense_bytes(table), _dense_bytes(made[0])) if packet in _LOOKUPS else _dense_bytes(table)
    return looked_up + sum(map(_dense_bytes, rest)) + written


# -- formulas ---------------------------------------------------------------------------------------------------------


@functools.cache
def _formula(func: Any) -> Formula | None:
    """Choose the formula of an op; ours where torch's is missing or counts what is not computed."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _OWN:
        return _OWN[packet]
    if isinstance(func, HigherOrderOperator):
        if func.name() in ("flex_attention", "flex_attention_backward"):
            return lambda func, args, kwargs, out: flex_attention_flops(func.name(), args, kwargs)
    elif attention_layout(func._schema.name):
        return lambda func, args, kwargs, out: fused_attention_flops(func._schema.name, _named(func, args, kwargs))
    if packet in flop_registry:
        return lambda func, args, kwargs, out: flop_registry[packet](*args, **kwargs, out_val=out)
    return None


def _named(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Give a call's arguments by the names in the op's schema; defaults are left out."""
    return {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def _grouped_mm(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """2*M*K*N where groups split M (2-D by 3-D), N (3-D by 2-D) or K (2-D by 2-D); G times that for 3-D by 3-D.

    An element of a split axis belongs to one group. Rows behind the last offset count, though no kernel computes them.
    """
    a, b = args[:2]
    rows = a.shape[-2] if b.dim() == 2 else a.numel() // a.shape[-1]
    return 2 * rows * a.shape[-1] * b.shape[-1]


def _conv_backward(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """Input and weight gradient cost a forward each: 2 * rows * positions * weights. Torch's ignores groups."""
    grad_out, x, weight = args[:3]
    transposed, wanted = args[7], args[10]
    positions = prod((x if transposed else grad_out).shape[2:])
    return 2 * x.shape[0] * positions * weight.numel() * (bool(wanted[0]) + bool(wanted[1]))


def _per_element(position: int) -> Formula:
    """One multiply-add for each element of an argument."""
    return lambda func, args, kwargs, out: 2 * args[position].numel()


def _linear(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    return 2 * args[0].numel() * args[1].shape[0]


def _addbmm(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    return 2 * args[1].numel() * args[2].shape[-1]


def _plain_mm(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    return 2 * args[0].numel() * args[1].shape[-1]


_OWN: dict[Any, Formula] = {
    aten._grouped_mm: _grouped_mm,
    aten._scaled_grouped_mm: _grouped_mm,
    aten.convolution_backward: _conv_backward,
    aten.mv: _per_element(0),
    aten.dot: _per_element(0),
    aten.vdot: _per_element(0),
    aten.addmv: _per_element(1),
    aten.addbmm: _addbmm,
    aten._addmm_activation: _addbmm,
    aten._int_mm: _plain_mm,
    aten.linear: _linear,
}

_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.select_copy, aten.slice_copy}
_ALLOCATIONS = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted,
}  # fmt: skip
_FILLS = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like, aten.new_zeros, aten.new_ones,
    aten.new_full,
}  # fmt: skip
_OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.normal_, aten.uniform_, aten.bernoulli_, aten.random_}
_ALIASES = {aten.detach, aten.alias, aten._unsafe_view, aten.lift_fresh, aten._local_scalar_dense}


@functools.cache
def _makes_no_traffic(func: Any) -> bool:
    packet = getattr(func, "overloadpacket", func)
    return bool(getattr(func, "is_view", False)) or packet in _ALLOCATIONS or packet in _ALIASES


@functools.cache
def _is_composite(func: Any) -> bool:
    if isinstance(func, HigherOrderOperator) or func is torch.ops.prim.device.default:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    # silu_backward and a few more have a kernel of their own beside the composite: decomposing them changes rounding.
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not any(
        has_kernel(func.name(), backend) for backend in ("CPU", "CUDA", "Meta")
    )


def _dense_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements: expanded dimensions (stride 0) count once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride or not size) * tensor.element_size()


def _bytes_in_place(packet: Any, schema: Any, args: tuple, kwargs: Mapping[str, Any]) -> int:
    """Bytes of an op that writes arguments: those are read too, unless they are an `out=` or overwritten whole."""
    total = 0
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        size = sum(map(_dense_bytes, flat_tensors(value)))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not is_written or not (argument.kwarg_only or packet in _OVERWRITES)
        total += size * (is_written + is_read)
    return total
