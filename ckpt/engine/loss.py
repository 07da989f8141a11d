"""`loss="chunked"`: a causal LM computes its loss without (T, vocab) logits; undone as if it had never been.

Owns what is put on a model: an instance `forward` on the head and on the model that owns it, and the model's loss
function, each with the way back. Must not know how a chunk is computed (`loss_chunks`) or what lazy logits understand.

    attached = attach_chunked_loss(model)            # before compile and fully_shard, after PEFT
    model(input_ids, labels=labels).loss.backward()
    attached.report()                                # {"head": "lm_head", "mode": "chunked", ...}
    attached.undo()

A call with labels gets lazy logits from its head (`lazy_logits`); the model's own code scales, caps, shifts and
flattens them, and the cross entropy at its end runs in chunks. Whatever else is done to them makes the real logits: the
same values, at full memory, and `report()` says so. A call without labels is left alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from ckpt.engine.lazy_logits import lazy
from ckpt.engine.lazy_state import Stats
from ckpt.engine.loss_call import HeadCall

logger = logging.getLogger(__name__)

_CHUNKED, _FULL, _NOT_RUN = "chunked", "full logits", "not run"


@dataclasses.dataclass
class Switch:
    """What the patches of one model share: whether they act, whether a call with labels runs, what came of it."""

    chunk_tokens: int | None
    active: bool = True
    depth: int = 0
    calls: int = 0
    row_checked: bool = False
    compiled: bool = False
    said: bool = False
    stats: Stats = dataclasses.field(default_factory=Stats)

    def outcome(self) -> tuple[str, str]:
        """Return the mode of the last call with labels, and the reason for it."""
        stats = self.stats
        if self.compiled:
            return _FULL, "torch.compile traced the model"
        if not self.calls:
            return _NOT_RUN, "no call with labels yet"
        if stats.refused:
            return _FULL, stats.refused
        if stats.num_chunked:
            later = f"; logits were then read by {stats.made_real_by[-1]}" if stats.made_real_by else ""
            return _CHUNKED, f"{stats.num_chunked} loss in chunks of {stats.tokens_per_chunk} tokens{later}"
        if not stats.num_lazy:
            return _FULL, "the model computed logits without calling its head"
        if stats.made_real_by:
            return _FULL, f"the model applies {stats.made_real_by[0]} to its logits"
        return _FULL, "the model computed no loss from its logits"


class Attached:
    """The chunked loss of one model: a report on the last call with labels, and the way back."""

    def __init__(self, head_name: str | None, switch: Switch, patches: list[_Patch], reason: str = "") -> None:
        self._head_name, self._switch, self._patches, self._reason = head_name, switch, patches, reason

    def report(self) -> dict[str, Any]:
        """Return head, mode ("chunked", "full logits", "not run"), reason, chunk_tokens (None: by shape) and calls."""
        mode, reason = (_FULL, self._reason) if self._reason else self._switch.outcome()
        return {
            "head": self._head_name,
            "mode": mode,
            "reason": reason,
            "chunk_tokens": self._switch.chunk_tokens,
            "calls": self._switch.calls,
        }

    def undo(self) -> None:
        """Put back every attribute as it was. Calling it twice does nothing."""
        for patch in reversed(self._patches):
            patch.undo()
        self._patches = []
        self._switch.active = False


def attach_chunked_loss(model: nn.Module, *, chunk_tokens: int | None = None) -> Attached:
    """Make `model(..., labels=...)` compute its loss in chunks of `chunk_tokens` tokens (None: chosen by shape).

    Works on the causal LM inside `model` (PEFT and other wrappers are looked through), on this instance alone, and on
    deep copies of it. A model whose head cannot be found stays as it is; `report()` gives the reason.

    Raises:
        ValueError: `chunk_tokens` is no positive int, or the model already has a chunked loss.
    """
    if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
        raise ValueError(f"chunk_tokens={chunk_tokens!r} is not allowed: give an int >= 1, or None to choose by shape.")
    switch = Switch(chunk_tokens, stats=Stats(chunk_tokens))
    owner, head, reason = find_head(model)
    if reason:
        logger.warning("loss='chunked': %s; %s runs with full logits.", reason, type(model).__name__)
        return Attached(None, switch, [], reason)
    if isinstance(vars(owner).get("forward"), _OwnerForward) or isinstance(vars(head).get("forward"), _HeadForward):
        raise ValueError("This model already has a chunked loss. Call undo() of the first before attaching another.")
    patches = [
        _Patch(owner, "forward", _OwnerForward(owner, vars(owner).get("forward"), switch)),
        _Patch(head, "forward", _HeadForward(head, vars(head).get("forward"), switch)),
    ]
    if isinstance(owner, PreTrainedModel):
        patches.append(_Patch(owner, "_loss_function", _LossFunction(owner.loss_function)))
    name = next(name for name, module in model.named_modules() if module is head)
    return Attached(name, switch, patches)


def find_head(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None, str]:
    """Return the causal LM inside `model`, its output head, and why there is none ("" if there is)."""
    candidates = [module for module in model.modules() if isinstance(module, PreTrainedModel)] or [model]
    for owner in candidates:
        getter = getattr(owner, "get_output_embeddings", None)
        head = getter() if getter is not None else None
        takes_labels = "labels" in inspect.signature(owner.forward).parameters
        if isinstance(head, nn.Module) and takes_labels:
            inside = any(module is head for module in owner.modules())
            return (owner, head, "") if inside else (None, None, "its output head is not one of its modules")
    return None, None, "no module with an output head and a labels argument was found"


class _Patch:
    """One instance attribute, replaced; put back as it was unless someone has replaced it since."""

    def __init__(self, module: nn.Module, name: str, value: object) -> None:
        self._module, self._name, self._value = module, name, value
        self._had, self._old = name in vars(module), vars(module).get(name)
        vars(module)[name] = value

    def undo(self) -> None:
        if vars(self._module).get(self._name) is not self._value:
            # Our object stays beneath the other one and passes calls on: Switch.active is off from now on.
            logger.warning(
                "loss='chunked': %s.%s was replaced by other code after us and is left as it is; undo that first to get"
                " the original back.",
                type(self._module).__name__,
                self._name,
            )
        elif self._had:
            vars(self._module)[self._name] = self._old
        else:
            del vars(self._module)[self._name]


class _InstanceForward:
    """A `forward` for one module instance, without a reference cycle. A deep copy's or a pickle's is the copy's own."""

    def __init__(self, module: nn.Module, original: Callable | None, switch: Switch) -> None:
        self._module = weakref.ref(module)
        self.original = original
        """The instance attribute that stood here before us, or None for the class's forward."""
        self.switch = switch

    def __reduce__(self):
        # Copy and pickle meet the module before its attributes, so the copy's module is known by now.
        return type(self), (self._module(), self.original, self.switch)

    def run_original(self, *args, **kwargs):
        if self.original is not None:
            return self.original(*args, **kwargs)
        module = self._module()
        return type(module).forward(module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's own: Trainer and generate read argument names from `model.forward`."""
        if self.original is not None:
            return inspect.signature(self.original)
        return inspect.signature(type(self._module()).forward.__get__(self._module()))


class _OwnerForward(_InstanceForward):
    """Opens the switch while a call with labels is under way."""

    def __init__(self, module: nn.Module, original: Callable | None, switch: Switch) -> None:
        super().__init__(module, original, switch)
        self._labels_index = list(self.__signature__.parameters).index("labels")

    def __call__(self, *args, **kwargs):
        labels = kwargs.get("labels", args[self._labels_index] if len(args) > self._labels_index else None)
        switch = self.switch
        if labels is None or not switch.active:
            return self.run_original(*args, **kwargs)
        if torch.compiler.is_compiling():  # nothing is counted: a count that dynamo reads means a new graph every call
            switch.compiled = True
            return self.run_original(*args, **kwargs)
        if not switch.depth:
            switch.calls += 1
            switch.stats = Stats(switch.chunk_tokens)
        switch.depth += 1
        try:
            outputs = self.run_original(*args, **kwargs)
        finally:
            switch.depth -= 1
        mode, reason = switch.outcome()
        if mode == _FULL and not switch.said:
            switch.said = True
            logger.warning("loss='chunked': %s; %s runs with full logits.", reason, type(self._module()).__name__)
        return outputs


class _HeadForward(_InstanceForward):
    """Returns lazy logits to a model that was called with labels, ordinary ones to anyone else."""

    def __call__(self, *args, **kwargs):
        switch = self.switch
        if not (switch.active and switch.depth):
            return self.run_original(*args, **kwargs)
        switch.stats.refused = self._reason_against(args, kwargs)
        if switch.stats.refused:
            return self.run_original(*args, **kwargs)
        (hidden,) = args
        call = HeadCall.capture(self._module(), hidden, self.run_original, is_own_forward=self.original is None)
        if not switch.row_checked:
            switch.stats.refused = call.row_independence_error(hidden)
            if switch.stats.refused:
                return self.run_original(hidden)
            switch.row_checked = True
        return lazy(call, hidden, switch.stats)

    def _reason_against(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Say why this call must return ordinary logits, or None."""
        head = self._module()
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return "the head is called with more than hidden states"
        if args[0].dim() < 2 or not args[0].numel():
            return "the head is called with no tokens"
        if any(isinstance(tensor, DTensor) for tensor in (args[0], *head.parameters())):
            return "the head is split over ranks (tensor parallel)"
        if any(isinstance(module, _DropoutNd) and module.p > 0 and module.training for module in head.modules()):
            return "the head has dropout, whose random numbers would differ by chunk"
        return None


class _LossFunction:
    """The model's loss function, with one division by zero less: a global batch without a label divides by 1."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __call__(self, *args, **kwargs):
        count = kwargs.get("num_items_in_batch")
        if count is not None:
            kwargs["num_items_in_batch"] = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return self.original(*args, **kwargs)
