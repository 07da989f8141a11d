"""Logits that are not there yet: a tensor of the right shape that remembers how to be computed.

Owns `LazyLogits` and which tensor functions it understands. Must not know models, or how a chunked loss is computed.

    logits = lazy(call, hidden, stats)              # no memory; hidden (B, T, D) gives logits (B, T, V)
    logits.float()[..., :-1, :].view(-1, V)         # still none: a row of logits depends on its row of hidden alone
    F.cross_entropy(logits.view(-1, V), labels)     # chunked
    logits.softmax(-1)                              # anything else: the real logits are made, once, and used

Legend: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ckpt.engine import loss_chunks
from ckpt.engine.loss_heads import HeadCall, Operation, Widen

plain = torch._C.DisableTorchFunctionSubclass


@dataclasses.dataclass
class Stats:
    """What became of the lazy logits of one forward."""

    chunk_tokens: int | None = None
    """As asked for; None: by shape."""
    num_lazy: int = 0
    num_chunked: int = 0
    tokens_per_chunk: int = 0
    refused: str | None = None
    """Why the head's output is not lazy."""
    made_real_by: list[str] = dataclasses.field(default_factory=list)
    """Names of the functions that needed real logits."""


@dataclasses.dataclass
class _State:
    call: HeadCall
    hidden: Tensor
    operations: tuple[Operation, ...]
    stats: Stats
    grad_mode: bool
    family: dict[str, bool]
    """Shared by all lazy views of the same logits; `viewed` once there is more than one."""
    real: Tensor | None = None
    real_grad_mode: bool = False
    written: bool = False


class LazyLogits(torch.Tensor):
    """(..., V) logits made on first use. Differentiable in every way: also below `__torch_function__`, by `_Connect`."""

    state: _State

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LazyLogits:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            handled = name in _GETTERS
        else:
            handled = name in _METADATA
        if handled:
            with plain():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(name)
        stays_lazy = handler and not any(_is_real(value) for value in args)
        if stays_lazy and args and (isinstance(args[0], LazyLogits) or handler is _rowwise):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _with_real(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Reached only by code that switched __torch_function__ off. Gradients come through _Connect.
        return func(*_reals(args, func.__name__), **_reals(kwargs or {}, func.__name__))


def lazy(call: HeadCall, hidden: Tensor, stats: Stats) -> LazyLogits:
    """Return the lazy logits of one head call. `hidden` (..., D) is kept alive as long as they are."""
    vocab_size, dtype = call.shape_of_row(hidden)
    stats.num_lazy += 1
    state = _State(call, hidden, (), stats, torch.is_grad_enabled(), {"viewed": False})
    return _build(state, vocab_size, dtype)


def real(logits: Tensor, reason: str) -> Tensor:
    """Return the logits themselves, computed at most once for each grad mode. Ordinary tensors pass through."""
    if not isinstance(logits, LazyLogits):
        return logits
    state = logits.state
    wants_graph = state.grad_mode and torch.is_grad_enabled()
    if state.real is None or (wants_graph and not state.real_grad_mode and not state.written):
        state.stats.made_real_by.append(reason)
        with torch.set_grad_enabled(wants_graph):
            state.real = state.call.compute(state.hidden, state.operations)
        state.real_grad_mode = wants_graph
    return state.real


class _Connect(torch.autograd.Function):
    """Ties lazy logits into the graph, for what differentiates them without asking (a custom autograd.Function)."""

    @staticmethod
    def forward(ctx, state: _State, vocab_size: int, dtype: torch.dtype, hidden: Tensor, *parameters: Tensor):
        ctx.state = state
        ctx.save_for_backward(hidden, *parameters)
        return LazyLogits((*hidden.shape[:-1], vocab_size), dtype, hidden.device)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden, *parameters = ctx.saved_tensors
        state = ctx.state
        if state.written:
            raise RuntimeError("Logits of loss='chunked' were written in place and then used by a custom autograd.Function.")
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = state.call.compute(leaf, state.operations)
            inputs = [leaf, *parameters]
            found = torch.autograd.grad(logits, inputs, gradient, allow_unused=True, materialize_grads=True)
        return None, None, None, *found


def _build(state: _State, vocab_size: int, dtype: torch.dtype) -> LazyLogits:
    parameters = state.call.parameters()
    if torch.is_grad_enabled() and state.grad_mode and (state.hidden.requires_grad or parameters):
        logits = _Connect.apply(state, vocab_size, dtype, state.hidden, *parameters)
    else:
        logits = LazyLogits((*state.hidden.shape[:-1], vocab_size), dtype, state.hidden.device)
    logits.state = state
    return logits


def _derive(logits: LazyLogits, *, hidden: Tensor | None = None, operation: Operation | None = None, **changes) -> LazyLogits:
    """Return lazy logits computed from other rows (`hidden`) or by one more `operation`."""
    old = logits.state
    alias = operation is None and not changes.pop("copies", False)
    vocab_size = changes.pop("vocab_size", logits.shape[-1])
    dtype = changes.pop("dtype", logits.dtype)
    if alias:
        old.family["viewed"] = True
    state = dataclasses.replace(
        old,
        hidden=old.hidden if hidden is None else hidden,
        operations=old.operations if operation is None else (*old.operations, operation),
        family=old.family if alias else {"viewed": False},
        **changes,
    )
    return _build(state, vocab_size, dtype)


# ---- what stays lazy: views of the tokens ------------------------------------------------------------------------------


def _same(func, logits: LazyLogits, *args, **kwargs):
    return logits


def _detach(func, logits: LazyLogits, *args):
    return _derive(logits, hidden=logits.state.hidden.detach(), grad_mode=False)


def _clone(func, logits: LazyLogits, **kwargs):
    return _derive(logits, copies=True)


def _reshape(func, logits: LazyLogits, *shape, **kwargs):
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else list(shape)
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = logits.numel() // known if known else 0
    if len(sizes) < 2 or sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    hidden = logits.state.hidden
    return _derive(logits, hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(func, logits: LazyLogits, start_dim: int = 0, end_dim: int = -1):
    if end_dim in (-1, logits.dim() - 1):
        return NotImplemented
    return _derive(logits, hidden=logits.state.hidden.flatten(start_dim, end_dim))


def _split(func, logits: LazyLogits, sizes, dim: int = 0):
    if dim in (-1, logits.dim() - 1):
        return NotImplemented
    return tuple(_derive(logits, hidden=part) for part in func(logits.state.hidden, sizes, dim=dim))


def _getitem(func, logits: LazyLogits, index):
    """Index the tokens; the last axis may be taken whole or sliced (padding of the vocabulary cut off)."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(type(item) in (int, slice, type(None), type(Ellipsis), Tensor) for item in items):
        return NotImplemented
    taken = sum(_axes_taken(item) for item in items)
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    last = slice(None)
    if taken == logits.dim() or (ellipses and ellipses[0] != len(items) - 1):
        last = items[-1]
        items[-1] = slice(None)
    if not isinstance(last, slice):
        return NotImplemented
    hidden = logits.state.hidden[tuple(items)]
    if hidden.dim() < 2:
        return NotImplemented
    rows = _derive(logits, hidden=hidden)
    if last == slice(None):
        return rows
    vocab_size = len(range(*last.indices(logits.shape[-1])))
    return _derive(rows, operation=lambda values: values[..., last], vocab_size=vocab_size)


def _axes_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


# ---- what stays lazy: one function of each row --------------------------------------------------------------------------


def _cast(func, logits: LazyLogits, *args, **kwargs):
    probe = func(_probe(logits), *args, **kwargs)
    if not isinstance(probe, Tensor):
        return probe
    if probe.device != logits.device:
        return NotImplemented
    if probe.dtype != logits.dtype:
        return _derive(logits, operation=Widen(probe.dtype), dtype=probe.dtype)
    return _clone(func, logits) if kwargs.get("copy") else logits


def _rowwise(func, *args, **kwargs):
    """Scaling, shifting, tanh: with numbers, or with a constant that has one value or one a vocabulary entry."""
    position, operation = _as_operation(func, args, kwargs)
    if operation is None:
        return NotImplemented
    return _derive(args[position], operation=operation, dtype=operation(_probe(args[position])).dtype)


def _rowwise_in_place(func, logits: LazyLogits, *args, **kwargs):
    """`logits /= scale`: the same object, one more operation. Not once a view shares these logits."""
    position, operation = _as_operation(getattr(torch.Tensor, func.__name__.rstrip("_")), (logits, *args), kwargs)
    if operation is None or logits.state.family["viewed"] or operation(_probe(logits)).dtype != logits.dtype:
        return NotImplemented
    logits.state.operations = (*logits.state.operations, operation)
    return logits


def _as_operation(func, args: tuple, kwargs: dict[str, Any]) -> tuple[int, Operation | None]:
    """Return where the logits stand among `args`, and the call as a function of them alone; None if it is not one."""
    holes = [position for position, value in enumerate(args) if isinstance(value, LazyLogits)]
    if len(holes) != 1 or any(isinstance(value, Tensor) for value in kwargs.values()):
        return 0, None
    hole = holes[0]
    vocab_size = args[hole].shape[-1]
    constants = list(args)
    for position, value in enumerate(args):
        if position == hole or not isinstance(value, Tensor):
            continue
        per_entry = value.dim() > 0 and value.shape[-1] == vocab_size == value.numel()
        if value.requires_grad or not (per_entry or value.numel() == 1):
            return hole, None
        args[hole].state.call.watch(value)
        constants[position] = value.reshape(-1) if value.dim() else value

    def operation(logits: Tensor) -> Tensor:
        return func(*constants[:hole], logits, *constants[hole + 1 :], **kwargs)

    return hole, operation


def _probe(logits: LazyLogits) -> Tensor:
    """No rows, all columns: tells an operation's dtype for nothing, on fake tensors too."""
    return logits.state.hidden.new_empty((0, logits.shape[-1]), dtype=logits.dtype)


# ---- what is computed in chunks -----------------------------------------------------------------------------------------


def _cross_entropy(
    func, logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    plain_case = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain_case or logits.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    state = logits.state
    hidden = state.hidden
    tokens = state.stats.chunk_tokens or loss_chunks.auto_chunk_tokens(*hidden.shape, logits.shape[-1])
    with torch.set_grad_enabled(state.grad_mode and torch.is_grad_enabled()):
        loss = loss_chunks.chunked_cross_entropy(
            state.call,
            state.operations,
            hidden,
            target,
            loss_chunks.Reduction(reduction, ignore_index, label_smoothing),
            tokens,
        )
    state.stats.num_chunked += 1
    state.stats.tokens_per_chunk = tokens
    return loss


def _argmax(func, logits: LazyLogits, dim=None, keepdim: bool = False):
    """The usual metric: predictions need no more logits at once than the loss does."""
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    hidden = logits.state.hidden
    rows = hidden.reshape(-1, hidden.shape[-1])
    tokens = logits.state.stats.chunk_tokens or loss_chunks.auto_chunk_tokens(*rows.shape, logits.shape[-1])
    with torch.no_grad():
        parts = [logits.state.call.compute(part, logits.state.operations).argmax(-1) for part in rows.split(tokens)]
    found = torch.cat(parts).view(hidden.shape[:-1])
    return found.unsqueeze(-1) if keepdim else found


# ---- everything else ----------------------------------------------------------------------------------------------------


def _with_real(func, name: str, args, kwargs):
    """Run `func` on real logits. A write goes to the real logits, and they stay the value from then on."""
    writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    target = args[0] if writes and args and isinstance(args[0], LazyLogits) else None
    if target is None:
        return func(*_reals(args, name), **_reals(kwargs, name))
    if target.state.family["viewed"] and not target.state.written:
        raise RuntimeError(
            f"{name} writes into logits that loss='chunked' has not computed yet and that share their values with a view "
            "taken before. Write before slicing, or use loss='full'."
        )
    with torch.set_grad_enabled(target.state.grad_mode):
        real(target, name)
    target.state.written = True
    result = func(*_reals(args, name), **_reals(kwargs, name))
    return target if result is target.state.real else result


def _is_real(value: Any) -> bool:
    """Whether these are lazy logits that have been made real, in a way that serves the present grad mode."""
    if not isinstance(value, LazyLogits) or value.state.real is None:
        return False
    state = value.state
    return state.written or state.real_grad_mode or not (state.grad_mode and torch.is_grad_enabled())


def _reals(tree: Any, reason: str) -> Any:
    return tree_map(lambda value: real(value, reason), tree)


_GETTERS = frozenset(
    "shape dtype device layout ndim is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_mps "
    "is_xpu is_hpu is_xla is_ipu is_maia is_mtia is_vulkan requires_grad grad_fn is_leaf grad nbytes itemsize output_nr "
    "_version _backward_hooks retains_grad".split()
)
# register_hook: FSDP2 hooks every output that requires a gradient, to be told of the backward; the loss tells it.
_METADATA = frozenset(
    "size dim ndimension numel nelement __len__ is_floating_point is_complex is_signed is_inference element_size get_device "
    "is_contiguous stride register_hook is_same_size __hash__ __dir__".split()
)
_ROWWISE = frozenset(
    "mul multiply div divide true_divide add sub subtract tanh __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ "
    "__rsub__ rsub neg clamp".split()
)
_HANDLERS: dict[str, Callable[..., Any]] = {
    "contiguous": _same,
    "detach": _detach,
    "data": _detach,
    "clone": _clone,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "split": _split,
    "chunk": _split,
    "__getitem__": _getitem,
    "cross_entropy": _cross_entropy,
    "argmax": _argmax,
}
_HANDLERS |= dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type", "type_as"), _cast)
_HANDLERS |= dict.fromkeys(_ROWWISE, _rowwise)
_HANDLERS |= dict.fromkeys(("mul_", "div_", "true_divide_", "add_", "sub_", "tanh_", "clamp_"), _rowwise_in_place)
