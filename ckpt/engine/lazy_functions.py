"""Which tensor functions leave lazy logits lazy, and what they then become.

Owns `HANDLERS`: function name -> handler, which returns NotImplemented where only real logits will do. A handler moves
the hidden states instead of the logits (a view of tokens), records one function of each row (a scale, a soft cap, a
cast), or computes in chunks what needs no more (cross entropy, argmax). Must not know models, or how a head is run.

Legend: D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ckpt.engine.lazy_state import is_lazy
from ckpt.engine.loss_chunks import Reduction, auto_chunk_tokens, chunked_cross_entropy
from ckpt.engine.loss_heads import Operation, Widen


def name_of(func: Callable) -> str:
    """Return the name of a function as `__torch_function__` sees it; of an attribute, the attribute's."""
    return func.__self__.__name__ if func.__name__ == "__get__" else func.__name__


def handler_of(name: str, args: tuple) -> Callable[..., Any] | None:
    """Return the handler of a call, if there is one for lazy logits at that place among the arguments."""
    handler = HANDLERS.get(name) if args and (is_lazy(args[0]) or name in _BINARY) else None
    return None if any(is_lazy(value) and value.state.is_real() for value in args) else handler


def is_metadata(func: Callable, name: str) -> bool:
    """Return whether shape, dtype and place answer the call, so that values are not needed."""
    if func.__name__ == "__get__":
        return name not in _VALUES
    return name in _QUESTIONS


# Attributes of a tensor that hold its values; all others are metadata or the graph's.
_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data", "__cuda_array_interface__"}
_QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous", "element_size"),
    *(
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_same_size",
        "__hash__",
        "__dir__",
    ),
}


# Views of the tokens: the same view of the hidden states.


def _same(func, logits, *args, **kwargs):
    return logits


def _detach(func, logits):
    return logits.derive(hidden=logits.state.hidden.detach(), detach=True)


def _clone(func, logits, **kwargs):
    return logits.derive(shares=False)


def _reshape(func, logits, *shape, **kwargs):
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else list(shape)
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if sizes.count(-1) == 1 and 0 not in sizes:
        sizes[sizes.index(-1)] = logits.numel() // -math.prod(sizes)
    if len(sizes) < 2 or sizes[-1] != logits.shape[-1] or math.prod(sizes) != logits.numel():
        return NotImplemented
    hidden = logits.state.hidden
    return logits.derive(hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(func, logits, start_dim: int = 0, end_dim: int = -1):
    if end_dim in (-1, logits.dim() - 1):
        return NotImplemented
    return logits.derive(hidden=logits.state.hidden.flatten(start_dim, end_dim))


def _split(func, logits, sizes, dim: int = 0):
    if dim in (-1, logits.dim() - 1):
        return NotImplemented
    return tuple(logits.derive(hidden=part) for part in func(logits.state.hidden, sizes, dim=dim))


def _getitem(func, logits, index):
    """Index tokens as asked; the last axis may be taken whole or sliced (padding of the vocabulary cut off)."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(type(item) in (int, slice, type(None), type(Ellipsis), Tensor) for item in items):
        return NotImplemented
    last: Any = slice(None)
    names_every_axis = sum(_axes_taken(item) for item in items) == logits.dim()
    if names_every_axis or any(item is Ellipsis for item in items[:-1]):
        last, items[-1] = items[-1], slice(None)
    if not isinstance(last, slice):
        return NotImplemented
    hidden = logits.state.hidden[tuple(items)]
    if hidden.dim() < 2:
        return NotImplemented
    rows = logits.derive(hidden=hidden)
    if last == slice(None):
        return rows
    vocab_size = len(range(*last.indices(logits.shape[-1])))
    return rows.derive(operation=lambda values: values[..., last], vocab_size=vocab_size)


def _axes_taken(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


# One function of each row: recorded, and run on a chunk's logits.


def _cast(func, logits, *args, **kwargs):
    probe = func(_probe(logits), *args, **kwargs)
    if not isinstance(probe, Tensor):
        return probe
    if probe.device != logits.device:
        return NotImplemented
    if probe.dtype != logits.dtype:
        return logits.derive(operation=Widen(probe.dtype), dtype=probe.dtype)
    return logits.derive(shares=False) if kwargs.get("copy") else logits


def _rowwise(func, *args, **kwargs):
    """Scale, shift, cap: with numbers, or with a constant that has one value or one a vocabulary entry."""
    hole, operation = _as_operation(func, args, kwargs)
    if operation is None:
        return NotImplemented
    return args[hole].derive(operation=operation, dtype=operation(_probe(args[hole])).dtype)


def _rowwise_in_place(func, logits, *args, **kwargs):
    """`logits /= scale`: the same object, one more operation. Not once a view shares these logits."""
    _, operation = _as_operation(getattr(torch.Tensor, func.__name__.rstrip("_")), (logits, *args), kwargs)
    if operation is None or logits.state.family["viewed"] or operation(_probe(logits)).dtype != logits.dtype:
        return NotImplemented
    logits.state.operations = (*logits.state.operations, operation)
    return logits


def _as_operation(func, args: tuple, kwargs: dict[str, Any]) -> tuple[int, Operation | None]:
    """Return where the logits stand among `args`, and the call as a function of them alone; None if it is not one."""
    holes = [position for position, value in enumerate(args) if is_lazy(value)]
    if len(holes) != 1 or any(isinstance(value, Tensor) for value in kwargs.values()):
        return 0, None
    hole = holes[0]
    constants = list(args)
    for position, value in enumerate(args):
        if position == hole or not isinstance(value, Tensor):
            continue
        per_entry = value.dim() > 0 and value.shape[-1] == value.numel() == args[hole].shape[-1]
        if value.requires_grad or not (per_entry or value.numel() == 1):
            return hole, None
        args[hole].state.call.watch(value)
        constants[position] = value.reshape(-1) if value.dim() else value

    def operation(logits: Tensor) -> Tensor:
        return func(*constants[:hole], logits, *constants[hole + 1 :], **kwargs)

    return hole, operation


def _probe(logits) -> Tensor:
    """No rows, all columns: tells an operation's dtype for nothing, on fake tensors too."""
    return logits.state.hidden.new_empty((0, logits.shape[-1]), dtype=logits.dtype)


# What needs no more logits than a chunk's.


def _cross_entropy(func, logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, **kwargs):
    reduction, smoothing = kwargs.pop("reduction", "mean"), kwargs.pop("label_smoothing", 0.0)
    one_number = reduction in ("mean", "sum") and weight is size_average is reduce is None
    one_class_a_row = is_lazy(logits) and logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if kwargs or not (one_number and one_class_a_row):
        return NotImplemented
    state = logits.state
    tokens = _chunk_tokens(logits)
    with torch.set_grad_enabled(state.wants_graph()):
        loss = chunked_cross_entropy(
            state.call, state.operations, state.hidden, target, Reduction(reduction, ignore_index, smoothing), tokens
        )
    state.stats.num_chunked += 1
    state.stats.tokens_per_chunk = tokens
    return loss


def _argmax(func, logits, dim=None, keepdim: bool = False):
    """The usual metric, predictions against labels, costs no more memory than the loss."""
    if dim not in (-1, logits.dim() - 1):
        return NotImplemented
    state = logits.state
    rows = state.hidden.reshape(-1, state.hidden.shape[-1])
    with torch.no_grad():
        parts = [state.call.compute(part, state.operations).argmax(-1) for part in rows.split(_chunk_tokens(logits))]
    found = torch.cat(parts).view(state.hidden.shape[:-1])
    return found.unsqueeze(-1) if keepdim else found


def _chunk_tokens(logits) -> int:
    vocab_size, hidden_size = logits.shape[-1], logits.state.hidden.shape[-1]
    return logits.state.stats.chunk_tokens or auto_chunk_tokens(logits.numel() // vocab_size, hidden_size, vocab_size)


# What asks for a gradient that never exists.


def _register_hook(func, logits, hook):
    # FSDP2 hooks a module's outputs to learn that backward has come to it, and gathers the parameters then. Whatever
    # stands for the logits in the graph, the loss or real logits, has to tell it.
    if not getattr(hook, "__module__", "").startswith("torch.distributed."):
        return _retain_grad(func, logits)
    logits.state.call.backward_hooks.append(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return func(logits, hook)


def _retain_grad(func, logits):
    raise RuntimeError(
        f"{func.__name__}: with loss='chunked' the loss has no gradient with respect to its logits. Use loss='full'."
    )


_BINARY = ("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "rsub", "__rsub__")

HANDLERS: dict[str, Callable[..., Any]] = {
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
    "register_hook": _register_hook,
    "retain_grad": _retain_grad,
    **dict.fromkeys(("float", "double", "half", "bfloat16", "to", "type", "type_as"), _cast),
    **dict.fromkeys((*_BINARY, "neg", "tanh", "clamp"), _rowwise),
    **dict.fromkeys(("mul_", "div_", "true_divide_", "add_", "sub_", "tanh_", "clamp_"), _rowwise_in_place),
}
