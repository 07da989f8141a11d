"""Logits that are not there yet: a tensor of the right shape that remembers how to be computed.

Owns `LazyLogits`: its place in autograd, and the way to real logits. Which tensor functions leave it lazy is
`lazy_functions`' affair. Must not know models, or how a chunked loss is computed.

    logits = lazy(call, hidden, stats)              # no memory; hidden (B, T, D) gives logits (B, T, V)
    logits.float()[..., :-1, :].view(-1, V)         # still none: a row of logits depends on its row of hidden alone
    F.cross_entropy(logits.view(-1, V), labels)     # chunked
    logits.softmax(-1)                              # anything else: the real logits are made, once, and used

Legend: B batch, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ckpt.engine.lazy_functions import handler_of, is_metadata, name_of
from ckpt.engine.lazy_state import State, Stats, is_lazy
from ckpt.engine.loss_call import HeadCall
from ckpt.engine.loss_heads import Operation


class LazyLogits(torch.Tensor):
    """(..., V) logits, made on first use, and a node of the graph, for what differentiates them without asking us."""

    state: State

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        if is_metadata(func, name):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (handler := handler_of(name, args)) is not None:
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _with_real(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Reached only by code that switched __torch_function__ off. Its gradients come through _Connect.
        return func(*_reals(args, func.__name__), **_reals(kwargs or {}, func.__name__))

    def derive(
        self,
        *,
        hidden: Tensor | None = None,
        operation: Operation | None = None,
        vocab_size: int | None = None,
        dtype: torch.dtype | None = None,
        detach: bool = False,
        shares: bool = True,
    ) -> LazyLogits:
        """Return lazy logits of other rows (`hidden`), or with one more `operation`.

        `shares` says that eager logits would share memory with the result, so that a write to one must reach the other.
        """
        old = self.state
        shares = shares and operation is None
        if shares:
            old.family["viewed"] = True
        state = dataclasses.replace(
            old,
            hidden=old.hidden if hidden is None else hidden,
            operations=old.operations if operation is None else (*old.operations, operation),
            grad_mode=old.grad_mode and not detach,
            family=old.family if shares else {"viewed": False},
        )
        return _build(state, vocab_size or self.shape[-1], dtype or self.dtype)


def lazy(call: HeadCall, hidden: Tensor, stats: Stats) -> LazyLogits:
    """Return the lazy logits of one head call. `hidden` (..., D) is kept alive as long as they are."""
    vocab_size, dtype = call.shape_of_row(hidden)
    stats.num_lazy += 1
    return _build(State(call, hidden, (), stats, torch.is_grad_enabled(), {"viewed": False}), vocab_size, dtype)


def real(logits: Tensor, reason: str) -> Tensor:
    """Return the logits themselves, computed at most once for each grad mode. Ordinary tensors pass through."""
    if not is_lazy(logits):
        return logits
    state = logits.state
    if not state.is_real():
        state.stats.made_real_by.append(reason)
        wants_graph = state.wants_graph()
        with torch.set_grad_enabled(wants_graph):
            state.real = state.call.announce_backward(state.call.compute(state.hidden, state.operations))
        state.real_grad_mode = wants_graph
    return state.real


class _Connect(torch.autograd.Function):
    """Gives lazy logits a `grad_fn`: a custom autograd.Function that is handed them never asks `__torch_function__`."""

    @staticmethod
    def forward(ctx, state: State, vocab_size: int, dtype: torch.dtype, hidden: Tensor, *parameters: Tensor):
        ctx.state = state
        ctx.save_for_backward(hidden, *parameters)
        return LazyLogits((*hidden.shape[:-1], vocab_size), dtype, hidden.device)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden, *parameters = ctx.saved_tensors
        if ctx.state.written:
            raise RuntimeError(
                "The logits of loss='chunked' were written in place and then given to a custom autograd.Function. Use "
                "loss='full' for this model."
            )
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = ctx.state.call.compute(leaf, ctx.state.operations)
            inputs = [leaf, *parameters]
            found = torch.autograd.grad(logits, inputs, gradient, allow_unused=True, materialize_grads=True)
        return None, None, None, *found


def _build(state: State, vocab_size: int, dtype: torch.dtype) -> LazyLogits:
    parameters = state.call.parameters() if state.wants_graph() else []
    if state.wants_graph() and (state.hidden.requires_grad or parameters):
        logits = _Connect.apply(state, vocab_size, dtype, state.hidden, *parameters)
    else:
        logits = LazyLogits((*state.hidden.shape[:-1], vocab_size), dtype, state.hidden.device)
    logits.state = state
    return logits


def _with_real(func, name: str, args: tuple, kwargs: dict[str, Any]):
    """Run `func` on real logits. What it writes in place are the real logits, and their value from then on."""
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if not (writes and args and is_lazy(args[0])):
        return func(*_reals(args, name), **_reals(kwargs, name))
    logits = args[0]
    if logits.state.family["viewed"] and not logits.state.written:
        raise RuntimeError(
            f"{name} writes into logits that loss='chunked' has not computed yet, and that share their values with a "
            "view taken before. Write before slicing, or use loss='full'."
        )
    with torch.set_grad_enabled(logits.state.grad_mode):
        real(logits, name)
    logits.state.written = True
    result = func(*_reals(args, name), **_reals(kwargs, name))
    return logits if result is logits.state.real else result


def _reals(tree: Any, reason: str) -> Any:
    return tree_map(lambda value: real(value, reason), tree)
