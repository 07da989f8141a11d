"""Which attention runs, given what was asked for, what is installed and what fits the model, and why nothing better.

Nothing is ever fetched: Transformers would download a kernel for a FlashAttention that is not installed, so such a
name is given out only when its package is there. Serves transformers 5.23+ and torch 2.11+.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ckpt.attention.families import check_isolation, decoder, dropout_in, layer_types, model_class, refusal, text_config
from ckpt.attention.interface import NAME, NAME_EAGER
from ckpt.attention.prepare import Packing

REQUESTS = ("auto", "flash", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
_PACKAGES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
_CAPABILITY = {"flash_attention_3": "9.0 (Hopper)", "flash_attention_2": "8.0 (Ampere) or newer"}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """An attention implementation for `prepare`, the kernel that it runs, and why it is not a better one."""

    implementation: str
    kernel: str
    why: str = ""
    is_flash: bool = True
    torch_flash: str | None = None  # "FA3": torch's flash entry points must be switched to it first

    def __str__(self) -> str:
        return f"{self.implementation}: {self.kernel}." + (f" {self.why}" if self.why else "")

    def activate(self) -> None:
        """Switch torch's flash entry points to FlashAttention-3 if that was chosen: for the whole process."""
        if self.torch_flash:
            torch.nn.attention.activate_flash_attention_impl(self.torch_flash)


@dataclass(frozen=True)
class _Facts:
    """What decides about kernels: the model's class and config, the device, and how rows are filled."""

    model: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    packing: Packing
    seq_len: int | None

    @property
    def half_on_cuda(self) -> bool:
        return self.device.type == "cuda" and self.dtype in (torch.bfloat16, torch.float16)

    @property
    def window(self) -> int | None:
        """The sliding window, where one is in force and shorter than the row."""
        window, kinds = getattr(self.config, "sliding_window", None), layer_types(self.config)
        slides = window and (not kinds or "sliding_attention" in kinds)
        return window if slides and (self.seq_len is None or window < self.seq_len) else None

    @property
    def softcap(self) -> bool:
        return bool(getattr(self.config, "attn_logit_softcapping", None))

    @property
    def head_size(self) -> int:
        sizes = [getattr(self.config, name, None) or 0 for name in ("head_dim", "v_head_dim")]
        latent = (getattr(self.config, "qk_nope_head_dim", None) or 0) + (
            getattr(self.config, "qk_rope_head_dim", None) or 0
        )
        return max(*sizes, latent) or self.config.hidden_size // self.config.num_attention_heads

    def supports(self, flag: str) -> bool:
        return bool(getattr(self.model, flag, False))

    def blocked(self, name: str) -> str | None:
        """Say what stands against `flash_attention_2` or `_3`; None when it can run."""
        version = f"FlashAttention-{name[-1]}"
        if self.device.type != "cuda":
            return f"{version} needs a CUDA device"
        if not self.half_on_cuda:
            return f"{version} needs bf16 or fp16, got {_short(self.dtype)}"
        major = torch.cuda.get_device_capability(self.device)[0]
        if (name == "flash_attention_3" and major != 9) or major < 8:
            return f"{version} needs compute capability {_CAPABILITY[name]}, this device has {major}.x"
        if self.head_size > 256:
            return f"{version} takes heads of up to 256, this model has {self.head_size}"
        if not self.supports("_supports_flash_attn"):
            return f"{version} is not supported by {_name(self.model)}"
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            return f"{version}: package {_PACKAGES[name]} is not installed"
        return None


def choose(
    model: Any,
    requested: str = "auto",
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    packing: Packing = "isolate",
    seq_len: int | None = None,
) -> Choice:
    """Choose the attention of a model (a module or a config).

    `dtype`: what attention computes in. `seq_len`: tokens in a row.

    Raises ValueError when `requested` is unknown, cannot run here, or cannot keep documents apart: never a silent
    fallback.
    """
    config = text_config(model.config if isinstance(model, nn.Module) else model)
    facts = _Facts(model_class(model), config, torch.device(device), dtype, packing, seq_len)
    if requested.startswith("kernels:"):
        return _from_hub(facts, requested.removeprefix("kernels:"))
    if requested not in REQUESTS:
        raise ValueError(f"attn={requested!r} is unknown. Use one of {', '.join(REQUESTS)}, or kernels:OWNER/NAME.")
    if packing == "isolate":
        check_isolation(model)
    choice = _isolating(facts, requested) if packing == "isolate" else _plain(facts, requested, model)
    if requested == "flash" and not choice.is_flash:
        raise ValueError(f"attn=flash cannot run: {choice.kernel} would. {choice.why} Set attn=auto to accept it.")
    return choice


def _from_hub(facts: _Facts, name: str) -> Choice:
    if not name:
        raise ValueError("attn=kernels: names no kernel. Write attn=kernels:OWNER/NAME.")
    if facts.packing == "isolate":
        raise ValueError(
            f"attn=kernels:{name} with data.packing=isolate: packed documents run on {NAME}. Set attn=auto, or "
            "data.packing=concat or none."
        )
    return Choice(name, f"kernel {name} from the hub", is_flash="flash" in name)


def _isolating(facts: _Facts, requested: str) -> Choice:
    """Choose the kernel under packed attention."""
    if requested == "eager":
        raise ValueError(
            "attn=eager with data.packing=isolate would build an S x S mask. Set attn=auto, or data.packing=concat or "
            "none."
        )
    if (
        requested in _PACKAGES
        and (reason := facts.blocked(requested))
        and (requested == "flash_attention_3" or "package" not in reason)
    ):
        raise ValueError(f"attn={requested} cannot run: {reason}. Set attn=auto.")
    name = NAME if facts.supports("_supports_sdpa") else NAME_EAGER
    if facts.softcap:
        return Choice(name, "blocks of plain math", "No flash kernel here caps scores.", is_flash=False)
    if facts.half_on_cuda and facts.head_size <= 256:
        third = facts.blocked("flash_attention_3")
        if (
            third is None
            and requested != "flash_attention_2"
            and hasattr(torch.nn.attention, "activate_flash_attention_impl")
        ):
            return Choice(name, "FlashAttention-3 with variable lengths", torch_flash="FA3")
        return Choice(name, "torch's FlashAttention-2 with variable lengths", f"{third}." if third else "")
    if facts.device.type == "cpu":
        return Choice(
            name, "flash attention for CPU, document by document", _sentence(facts.blocked("flash_attention_3"))
        )
    return Choice(name, "blocks of plain math", _sentence(facts.blocked("flash_attention_3")), is_flash=False)


def _plain(facts: _Facts, requested: str, model: Any) -> Choice:
    """Choose where documents may see each other, or have a row each."""
    if requested == "eager":
        return Choice("eager", "plain math with an S x S matrix", is_flash=False)
    if requested in _PACKAGES:
        if reason := facts.blocked(requested):
            raise ValueError(f"attn={requested} cannot run: {reason}. Set attn=auto.")
        return Choice(requested, f"FlashAttention-{requested[-1]}")
    sdpa, packed = _sdpa(facts), NAME if facts.supports("_supports_sdpa") else NAME_EAGER
    if requested == "sdpa":
        if not facts.supports("_supports_sdpa"):
            raise ValueError(f"attn=sdpa is not supported by {_name(facts.model)}. Set attn=auto or eager.")
        return sdpa
    reasons = {name: facts.blocked(name) for name in _PACKAGES}
    for name, reason in reasons.items():
        if reason is None:
            return Choice(name, f"FlashAttention-{name[-1]}", _sentence("; ".join(filter(None, reasons.values()))))
    why = _sentence("; ".join(reasons.values()))
    if not facts.supports("_supports_sdpa") or facts.window:
        if refusal(model) is None and dropout_in(facts.config) is None:
            inner = _isolating(_Facts(**{**vars(facts), "packing": "isolate"}), "auto")
            return Choice(packed, inner.kernel, inner.why, inner.is_flash, inner.torch_flash)
        if not facts.supports("_supports_sdpa"):
            return Choice(
                "eager", "plain math with an S x S matrix", f"{_name(facts.model)} supports no SDPA.", is_flash=False
            )
    return Choice(sdpa.implementation, sdpa.kernel, sdpa.why or why, sdpa.is_flash)


def _sdpa(facts: _Facts) -> Choice:
    """Say what SDPA runs: flash needs no mask, and on CUDA half precision and heads of up to 256."""
    if facts.window:
        return Choice(
            "sdpa",
            "SDPA with a dense S x S mask",
            f"The model's window of {facts.window} tokens is shorter than the row; attn=auto avoids the mask.",
            is_flash=False,
        )
    if facts.device.type == "cpu":
        return Choice("sdpa", "SDPA, flash attention for CPU")
    if facts.half_on_cuda and facts.head_size <= 256:
        return Choice("sdpa", "SDPA, torch's FlashAttention-2")
    return Choice(
        "sdpa",
        "SDPA, memory-efficient or math",
        f"Flash needs bf16 or fp16 and heads of up to 256, got {_short(facts.dtype)} and {facts.head_size}.",
        is_flash=False,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name(model: Any) -> str:
    return getattr(model, "__name__", "this model")


def _sentence(text: str | None) -> str:
    return f"{text}." if text else ""


def watch_masks(
    model: nn.Module, *, forbid: bool = False, say: Callable[[str], None] = log.warning
) -> Callable[[], None]:
    """Report once, through `say`, that a decoder layer was handed a dense S x S mask; return the undo.

    With `forbid` (attn=flash) it is a ValueError instead.
    """
    handles: list[Any] = []

    def undo() -> None:
        while handles:
            handles.pop().remove()

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        masks = [
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, Tensor)
            and x.ndim == 4
            and 1 < x.shape[-2] <= x.shape[-1]
            and x.shape[1] == 1
            and not x.requires_grad
        ]
        if not masks or not handles:
            return
        shape, size = tuple(masks[0].shape), masks[0].numel() * masks[0].element_size()
        text = (
            f"a dense attention mask {shape} of {size / 2**30:.3f} GiB was built, so that flash attention cannot run: "
            "padding, packed "
            "position_ids or a window shorter than the row"
        )
        undo()
        if forbid:
            raise ValueError(f"attn=flash: {text}. Pass no attention_mask, or set attn=auto with data.packing=isolate.")
        say(f"{text}. Pass no attention_mask, or set attn=auto with data.packing=isolate to avoid it.")

    layers = [m for m in decoder(model).modules() if isinstance(m, GradientCheckpointingLayer)]
    handles.extend(layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers)
    return undo
