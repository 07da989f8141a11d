"""A model of several ranks probed by each rank alone: on fake tensors, which need no weights and exchange nothing.

Some ranks may hold no weights yet (meta), so a probe on real ones would have some ranks wait for others that do not
come. Parameters and buffers are fake CPU tensors inside the block, and as they were behind it.

    with alone(model) as device:
        model(input_ids=torch.zeros(1, 4, dtype=torch.long, device=device), use_cache=False)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from ckpt.precision import local_part


@contextmanager
def alone(model: nn.Module) -> Iterator[torch.device]:
    """Let `model` run without other ranks and without weights, if it depends on them; yields where inputs go."""
    device = next(model.parameters()).device
    if not _depends_on_others(model):
        yield device
        return
    from ckpt.fake import FakeMode, real_path  # brings Transformers' mask code

    mode = FakeMode()
    with _fake_tensors(model, mode), ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(real_path(mode, one_document=True))
        yield torch.device("cpu")


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one with values."""
    return type(getattr(tensor, "data", tensor)) is torch.Tensor and not tensor.is_meta


def _depends_on_others(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    if any(isinstance(local_part(p).data, FakeTensor) for p in parameters):
        return False  # a simulation, which is alone already
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    attention = getattr(get(decoder=True) if get else config, "_attn_implementation", None)
    return any(p.is_meta or isinstance(p, DTensor) for p in parameters) or str(attention).startswith("ckpt_ulysses_")


@contextmanager
def _fake_tensors(model: nn.Module, mode: torch._subclasses.FakeTensorMode) -> Iterator[None]:
    """Put fake tensors of the same shapes in the place of all tensors of the model; tied ones stay tied."""
    places = [
        (holder, name, tensor)
        for module in model.modules()
        for holder in (module._parameters, module._buffers, vars(module))
        for name, tensor in holder.items()
        if isinstance(tensor, torch.Tensor)
    ]
    made: dict[int, torch.Tensor] = {}
    try:
        for holder, name, tensor in places:
            if id(tensor) not in made:
                made[id(tensor)] = _fake(tensor, mode)
            holder[name] = made[id(tensor)]
        yield
    finally:
        for holder, name, tensor in places:
            holder[name] = tensor


def _fake(tensor: torch.Tensor, mode: torch._subclasses.FakeTensorMode) -> torch.Tensor:
    local = local_part(tensor)
    with mode:
        value = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
    if isinstance(tensor, DTensor):
        value = DTensor(value, tensor._spec, requires_grad=False)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
