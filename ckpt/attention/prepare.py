"""Switch one model to packed attention, prove at its first forward that every layer obeys, and switch back.

    prepared = prepare(model, "isolate")
    model(input_ids=ids, position_ids=positions, cu_seq_lens_q=bounds, use_cache=False)
    prepared.num_layers          # attention layers seen to attend within documents: 32
    prepared.undo()

Boundaries are the batch's `cu_seq_lens_q`, else where `position_ids` restart, else the rows.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ckpt.attention import bounds as make_bounds
from ckpt.attention.families import check_isolation, decoder, dropout_in, layer_types, refusal, text_config, unwrap
from ckpt.attention.interface import NAME, NAME_EAGER, Witness, witness

Packing = Literal["isolate", "concat", "none"]


@dataclass
class Prepared:
    """The implementation in force, the attention layers proved (0 before the first forward), and the way back."""

    implementation: str
    num_layers: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the model its own attention and config objects back. A second call does nothing."""
        while self._undo:
            self._undo.pop()()


def prepare(model: nn.Module, packing: Packing = "isolate", implementation: str | None = None) -> Prepared:
    """Set the attention implementation of this model alone, reversibly; with `isolate`, guard and prove it.

    `implementation` defaults to packed attention. Models that share a config object are told apart: this one gets
    copies. Raises ValueError by name for families that cannot isolate documents, and for attention dropout above 0.
    """
    base = unwrap(model)
    packed = implementation in (None, NAME, NAME_EAGER)
    if packing == "isolate" and not packed:
        raise ValueError(
            f"packing=isolate runs on {NAME}, got attention implementation {implementation!r}. Leave it to choose, or "
            "set data.packing=concat or none."
        )
    if packed:
        _check(base, packing)
        implementation = implementation or (NAME if getattr(base, "_supports_sdpa", True) else NAME_EAGER)
    prepared = Prepared(implementation)
    prepared._undo.append(_switch(model, base, implementation))
    if packing == "isolate":
        prepared._undo.extend(_guard(model, prepared))
    return prepared


def _check(base: nn.Module, packing: Packing) -> None:
    if packing == "isolate":
        check_isolation(base)
    name, reason, dropout = type(base).__name__, refusal(base), dropout_in(base.config)
    if reason:
        raise ValueError(f"{NAME} does not fit {name} ({base.config.model_type}): {reason}. Set attn=sdpa.")
    if dropout:
        raise ValueError(
            f"{name} has {dropout[0]}={dropout[1]}; packed attention has no dropout. Set "
            f"model.config.{dropout[0]}=0.0, or data.packing=concat or none with attn=sdpa."
        )


def _switch(model: nn.Module, base: nn.Module, implementation: str) -> Callable[[], None]:
    """Point every module of the model at copies of its configs that name `implementation`; return the way back."""
    memo: dict[int, Any] = {}
    before: list[tuple[dict[str, Any], str, PreTrainedConfig]] = []
    base_config, decoder_config = base.config, text_config(base.config)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                before.append((vars(module), name, value))
    for attributes, name, value in before:
        attributes[name] = copy.deepcopy(value, memo)
    for config in (base_config, decoder_config):
        memo[id(config)]._attn_implementation_internal = implementation

    def undo() -> None:
        for attributes, name, value in before:
            attributes[name] = value

    return undo


def _guard(model: nn.Module, prepared: Prepared) -> list[Callable[[], None]]:
    """Hook the model's forward: supply boundaries, refuse padding, and at the first forward count who obeyed."""
    first: list[tuple[contextlib.ExitStack, Witness]] = []  # the forward that is being proved, while it runs

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        given = _by_name(module, args, kwargs)
        if given is None or _decodes(given):
            return None
        given = _with_bounds(given)
        if given is None:
            return None
        if not prepared.num_layers and not torch.compiler.is_compiling():
            running = contextlib.ExitStack()
            first.append((running, running.enter_context(_witnessed(module))))
        return (), given

    def after(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if not first:
            return
        running, seen = first.pop()
        running.close()
        if output is not None:  # None: the forward raised, and that error is the one to show
            prepared.num_layers = _prove(module, seen)

    handles = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    )
    return [handle.remove for handle in handles]


@contextlib.contextmanager
def _witnessed(model: nn.Module) -> Iterator[Witness]:
    """Have each call of the attention function noted; compiled layers run eagerly meanwhile, or none would be seen."""
    seen = Witness()
    token = witness.set(seen)
    compiled = any(m._compiled_call_impl is not None for m in model.modules())
    try:
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield seen
    finally:
        witness.reset(token)


def _by_name(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Name positional arguments, so that boundaries can be added whatever the call looked like."""
    if not args:
        return dict(kwargs)
    names = [
        p.name for p in inspect.signature(type(module).forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ][1:]
    return {**dict(zip(names, args, strict=False)), **kwargs} if len(args) <= len(names) else None


def _decodes(given: dict[str, Any]) -> bool:
    """Whether this forward continues from cached keys: nothing to pack then."""
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    return cache is not None and cache.get_seq_length() > 0


def _with_bounds(given: dict[str, Any]) -> dict[str, Any] | None:
    """Add the boundaries; None: padded rows outside of training, which the model's own attention handles."""
    inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    batch, tokens = inputs.shape[:2]
    positions, bounds = given.get("position_ids"), given.get("cu_seq_lens_q")
    if bounds is None:
        read = isinstance(positions, Tensor) and positions.ndim == 2 and not is_fake(positions)
        bounds = (
            make_bounds.from_positions(positions, batch)
            if read
            else make_bounds.from_starts(range(0, batch * tokens, tokens), batch, tokens).to(inputs.device)
        )
    mask = given.get("attention_mask")
    if mask is not None and not (mask.ndim == 2 and bool(mask.all())):
        if given.get("cu_seq_lens_q") is not None or torch.is_grad_enabled():
            raise ValueError(
                f"packing=isolate got an attention_mask of shape {tuple(mask.shape)} that hides tokens; documents "
                "are kept "
                "apart by their boundaries, without a mask. Pad on the right, give padding the label -100, and pass no "
                "attention_mask; or set data.packing=none."
            )
        return None
    return {
        **given,
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": given.get("max_length_q") or tokens,
        "max_length_k": given.get("max_length_k") or tokens,
    }


def _prove(model: nn.Module, seen: Witness) -> int:
    """Count the modules that attended within documents; ValueError unless each layer has one, with its window."""
    base = unwrap(model)
    config, name = text_config(base.config), type(base).__name__
    layers = [m for m in decoder(base).modules() if isinstance(m, GradientCheckpointingLayer)]
    blind = [m for m in layers if not any(part in seen.windows for part in m.modules())]
    if not seen.windows or seen.unbounded or blind:
        raise ValueError(
            f"packing=isolate: {name} called packed attention in {len(seen.windows)} modules, {len(seen.unbounded)} of "
            "them "
            f"without document boundaries; {len(blind)} of its {len(layers)} decoder layers did not call it. Documents "
            "would see each other: its forward does not hand cu_seq_lens_q on to every layer. Set data.packing=none "
            "(one document a row) or concat (documents see each other)."
        )
    kinds, wanted = layer_types(config), getattr(config, "sliding_window", None) or 0
    for module, window in seen.windows.items():
        index = getattr(module, "layer_idx", None)
        slides = bool(kinds) and index is not None and index < len(kinds) and kinds[index] == "sliding_attention"
        if slides and window != wanted:
            raise ValueError(
                f"packing=isolate: layer {index} of {name} attends in a window of {wanted} tokens, but asked its "
                "attention "
                f"function for {window or 'none'}. Set data.packing=none or concat, with attn=sdpa."
            )
    return len(seen.windows)
