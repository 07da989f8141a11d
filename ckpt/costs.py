"""What every op of a step costs: FLOPs, bytes moved, and whether it is run again; noted beside the ledger's changes.

Owns the list of ops. Knows the prices (`ckpt/flops.py`), no model and no device.

    with ledger, CostMode(ledger) as costs: step()
    sum(row.flops for row in costs.rows if row.is_replay)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.collectives import Collective, collective_of, only_waits
from ckpt.engine.keys import canonical_op
from ckpt.flops import op_bytes_moved, op_flops
from ckpt.flops_attention import attention_layout
from ckpt.ledger import Ledger
from ckpt.live import flat_tensors

in_backward = torch._C._current_graph_task_id


class OpCost(NamedTuple):
    """One op call, or several alike.

    weight: how many. position: changes of memory logged when its results were. op: canonical name. dtype: of its first
    floating-point tensor. is_attention: a fused attention kernel, forward or backward. is_replay: run again in
    backward, for gradients alone. shapes: of its tensor arguments, where a device's kernel may need scratch that
    depends on them (attention). collective: what it exchanges with other ranks; its bytes are the link's, not the
    memory's.
    """

    position: int
    op: str
    flops: int
    num_bytes: int
    dtype: torch.dtype
    is_attention: bool
    is_replay: bool
    shapes: tuple[torch.Size, ...]
    weight: int
    collective: Collective | None = None


class CostMode(TorchDispatchMode):
    """Note the cost of each op. Enter it inside the ledger, whose changes it counts."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside a simulation; the guard against it would cost a tenth of the time."""
        return False

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.rows: list[OpCost] = []
        self._ledger = ledger
        self._weight = 1

    @contextmanager
    def counting(self, times: int) -> Iterator[None]:
        """Count what is run inside so many times."""
        self._weight *= times
        try:
            yield
        finally:
            self._weight //= times

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # more than half of all calls: torch asks a fake tensor on every way
            return args[0].device if type(args[0]) is FakeTensor else func(*args)
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a sharded tensor unwraps itself: its local ops come back here
        kwargs = kwargs or {}
        is_replay = in_backward() != -1 and _is_forward(func)
        out = func(*args, **kwargs)
        if only_waits(func):
            return out
        collective = collective_of(func, args, kwargs)
        num_bytes = 0 if collective else op_bytes_moved(func, args, out, kwargs)
        flops = op_flops(func, args, kwargs, out)
        if flops or num_bytes or collective:
            given = flat_tensors(args)
            floating = next((t.dtype for t in (*given, *flat_tensors(out)) if t.is_floating_point()), torch.float32)
            name = canonical_op(func)
            attention = (
                flops > 0 and attention_layout(func._schema.name) is not None if hasattr(func, "_schema") else False
            )
            shapes = tuple(t.shape for t in given) if attention else ()
            self.rows.append(
                OpCost(
                    self._ledger.position, name, flops, num_bytes, floating, attention, is_replay, shapes, self._weight,
                    collective,
                )  # fmt: skip
            )
        return out


def _is_forward(func) -> bool:
    """Whether an op that runs inside backward belongs to a layer that is run again.

    The engine and torch.utils.checkpoint do that with gradients on, backward formulas run without. Custom ops always
    run without: of these the name tells.
    """
    if torch.is_grad_enabled():
        return True
    name = func._schema.name if hasattr(func, "_schema") else func.name()
    return not name.startswith(("aten::", "prims::")) and "backward" not in name and "bwd" not in name
