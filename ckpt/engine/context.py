"""The caller's contexts: what a forward sees beside its arguments, and its replay must see again.

Backward may be called anywhere: outside autocast, outside `sdpa_kernel`, after `eval()`, in another thread. A replay
under other settings is silently different, so a frame captures them when the layer runs and restores them around its
replay.

The version-dependent names of torch stand here alone (torch 2.11 to 2.14).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but generators. Hashable: it is part of a call's signature."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    sdp: tuple[bool, ...]
    default_dtype: torch.dtype
    training: tuple[bool, ...]  # by submodule of the layer
    attention: tuple[str | None, ...]  # by config of the layer


class Surroundings:
    """What to look at for one layer: its submodules and the configs they read their attention implementation from."""

    def __init__(self, layer: torch.nn.Module):
        self.modules = list(layer.modules())
        configs = {id(c): c for c in (m.__dict__.get("config") for m in self.modules) if hasattr(c, "to_dict")}
        self.configs = list(configs.values())

    def state(self) -> list[torch.Tensor]:
        """Return the layer's parameters and buffers, in a fixed order."""
        return [t for m in self.modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]

    def capture(self, device_type: str) -> Settings:
        devices = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        return Settings(
            autocast=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
            autocast_cache=torch.is_autocast_cache_enabled(),
            sdp=_sdp_flags(),
            default_dtype=torch.get_default_dtype(),
            training=tuple(m.training for m in self.modules),
            attention=tuple(getattr(c, "_attn_implementation_internal", None) for c in self.configs),
        )

    @contextmanager
    def restored(self, settings: Settings, device_type: str):
        """Run the block as if it stood where `settings` was captured."""
        now = self.capture(device_type)
        with ExitStack() as stack:
            for device, enabled, dtype in settings.autocast:
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=settings.autocast_cache)
                )
            if now.sdp != settings.sdp:
                _set_sdp_flags(settings.sdp)
                stack.callback(_set_sdp_flags, now.sdp)
            if now.default_dtype != settings.default_dtype:
                torch.set_default_dtype(settings.default_dtype)
                stack.callback(torch.set_default_dtype, now.default_dtype)
            if now.training != settings.training:
                self._set_training(settings.training)
                stack.callback(self._set_training, now.training)
            if now.attention != settings.attention:
                self._set_attention(settings.attention)
                stack.callback(self._set_attention, now.attention)
            yield

    def _set_training(self, flags: tuple[bool, ...]) -> None:
        for module, flag in zip(self.modules, flags, strict=True):
            module.training = flag

    def _set_attention(self, names: tuple[str | None, ...]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            config._attn_implementation_internal = name


def _sdp_flags() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def _set_sdp_flags(flags: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    setters = cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp
    for setter, flag in zip(setters, flags, strict=True):
        setter(flag)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the counter of in-place writes by which autograd sees that a saved tensor was modified."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@dataclass(frozen=True, slots=True)
class GeneratorStates:
    """State of the default generators: 5 KiB for the CPU's, 16 bytes for a CUDA device's."""

    cpu: torch.Tensor
    device_type: str
    device: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> GeneratorStates:
        if device.type in ("cpu", "meta"):
            return cls(torch.get_rng_state(), "cpu", None)
        return cls(torch.get_rng_state(), device.type, torch.get_device_module(device).get_rng_state(device))

    def equals(self, other: GeneratorStates) -> bool:
        """Compare without a torch op, which modes around the layer would see. Under fake tensors states
        have no values: what draws there is known from the record."""
        if torch._guards.detect_fake_mode() is not None:
            return True
        mine, its = (self.cpu, self.device), (other.cpu, other.device)
        return all(a is b or a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(mine, its, strict=True))

    def set(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.get_device_module(device).set_rng_state(self.device, device)


@contextmanager
def generators(states: GeneratorStates | None, device: torch.device):
    """Run the block from `states`, then put the generators back as they were. None: leave them alone."""
    if states is None:
        yield
        return
    before = GeneratorStates.capture(device)
    states.set(device)
    try:
        yield
    finally:
        before.set(device)
