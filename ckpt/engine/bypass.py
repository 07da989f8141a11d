"""Values that flow past the dispatcher, which a record of ops cannot see.

Skipping an op is right only if all that read its output are known. A layer that hands out values by `tolist` reads
them in Python; one that hands out pointers, or reads memory that no op wrote, runs kernels of its own (Triton, numpy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ckpt.engine.ops import UNINITIALISED

if TYPE_CHECKING:
    from ckpt.engine.record import Record

# Functions whose work is done by torch ops alone: our own, DTensor's way in, out and around (torch 2.11 to 2.13), and
# transformers' all-reduce of gradients, which is the identity in forward.
_TRANSPARENT = {"TiledChain", "_FromTorchTensor", "_ToTorchTensor", "Redistribute", "_AllReduceBackward"}


class PythonReads(TorchFunctionMode):
    """Calls `on_read(tensor, method)` for the methods that hand out a tensor's values without an op."""

    METHODS = {getattr(torch.Tensor, name): name for name in ("tolist", "numpy", "data_ptr", "__array__", "__dlpack__")}

    def __init__(self, on_read: Callable[[torch.Tensor, str], None]):
        super().__init__()
        self._on_read = on_read

    def __torch_function__(self, func, types, args=(), kwargs=None):
        method = self.METHODS.get(func)
        if method is not None and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            self._on_read(args[0], method)
        return func(*args, **(kwargs or {}))


def unseen_writes(record: Record) -> list[str]:
    """Return a remark for each uninitialised tensor that is read before any op of the record wrote it."""
    readers, writers = record.reads_and_writes()
    saved = {s.storage: s.at for s in reversed(record.saved)}
    found = []
    for op in record.ops:
        if op.func in UNINITIALISED and op.num_bytes > 0:
            for s in op.makes:
                first_read = min([*readers[s][:1], *([saved[s]] if s in saved else [])], default=None)
                if first_read is not None and not any(w < first_read for w in writers[s]):
                    found.append("a kernel outside the dispatcher")
    return found


def python_functions(output, inputs: list[torch.Tensor]) -> tuple[str, ...]:
    """Return the names of `torch.autograd.Function`s written in Python between a layer's inputs and its output.

    Those of `torch.library` ops are left out: their kernels are ops that a dispatch mode sees."""
    stop = {t.grad_fn for t in inputs if t.grad_fn is not None}
    queue = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen, names = set(stop), []
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            if not name.startswith("GeneratedBackwardFor_") and name not in _TRANSPARENT:
                names.append(name)
        queue += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return tuple(dict.fromkeys(names))
