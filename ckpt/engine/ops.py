"""What the engine must know of single ops: what they write, whether they draw random numbers or look at values.

Read off the op's schema and tags; what schemas do not say stands here by name. Knows nothing of records or policies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Unreplayable(ValueError):
    """A layer does what no replay can repeat. The message says what, and what to change."""


def _collective_wrappers() -> set[Any]:
    """Ops that wrap the result of a collective, and wait for it. Whether they are issued depends on the wrapper: a
    result that is skipped or fed has none, and none is made on fake tensors (torch 2.11 to 2.13)."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed import _functional_collectives  # noqa: F401  (registers the ops)

    names, space = ("wait_tensor", "_wrap_tensor_autograd"), torch.ops._c10d_functional
    return {getattr(space, name).default for name in names if hasattr(space, name)}


# Metadata queries and aliases without a value of their own: neither counted nor decided on. Autograd and the pack hooks
# issue `detach` at their own discretion, so counting it would make the numbering depend on the hooks.
IGNORED = _collective_wrappers() | {
    aten.detach.default,
    aten.alias.default,
    torch.ops.prim.device.default,
    aten.sym_size.default,
    aten.sym_stride.default,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    aten.is_contiguous.default,
    aten.is_contiguous.memory_format,
    aten.is_strides_like_format.default,
    aten.is_non_overlapping_and_dense.default,
}


# Ops that return memory as they found it. If it is read before any op wrote it, a kernel that the dispatcher does not
# know wrote it (Triton and pybind kernels take pointers).
UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# Batch norms write their running statistics, which their schemas do not say.
_RUNNING_STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage that holds the tensor's values: of a DTensor, this rank's part; of the result of a collective
    that may be under way (AsyncCollectiveTensor), what it wraps."""
    while type(tensor) not in _PLAIN:
        inner = getattr(tensor, "_local_tensor", None)
        inner = getattr(tensor, "elem", None) if inner is None else inner
        if not isinstance(inner, torch.Tensor):
            break
        tensor = inner
    return tensor.untyped_storage()


def is_parameter_cast(func: Any, args: tuple) -> bool:
    """True for the dtype cast of a parameter. Autocast caches these, so whether the op runs depends on the caller; they
    are left out of the numbering, never kept and always executed on replay."""
    return func is aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)


def written_arguments(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that `func` writes in place or through `out=`."""
    schema = getattr(func, "_schema", None)
    if schema is None or not (schema.is_mutable or schema.name in _BATCH_NORMS):
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if not is_written(schema, argument):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


def is_written(schema, argument) -> bool:
    """True if the op writes into this argument of its schema."""
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    return schema.name in _BATCH_NORMS and argument.name in _RUNNING_STATISTICS


def is_random(func, args: tuple, kwargs: dict) -> bool:
    """True if the call draws from a generator. A fused attention with dropout_p=0 carries the tag but draws nothing.

    Raises Unreplayable for a generator of the layer's own, whose state the engine does not carry over."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    if kwargs.get("generator") is not None:
        raise Unreplayable(
            f"{func} draws from a generator of the layer's own, so a replay would draw other numbers. "
            "Use torch's default generator in this layer, or keep its activations."
        )
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0.0
    return True


def is_data_dependent(func, args: tuple) -> bool:
    """True if a tensor's values decide a shape or reach Python. Indexing is so only by a boolean mask."""
    tags = getattr(func, "tags", ())
    if func is aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
