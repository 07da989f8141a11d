"""Token-wise parts of a model, run and differentiated tile by tile along the sequence.

A token-wise part is a chain of modules through which the hidden states pass and nothing else reads them in between: a
layer's MLP with the norms around it, or a norm alone. The last module of the chain runs the whole chain on one tile of
tokens at a time and saves the chain's input alone; the others hand their input through. In backward each tile is run
again and differentiated. So the MLP runs exactly twice: a layer's replay needs the chain's input, and its output is
skipped as dead (`Chain.num_passes` counts).

What is tiled is found by running the model once on a few tokens (`find_chains`): reading the code would not tell.
ALST (arXiv:2506.13996) tiles the same part inside a replayed layer and runs the MLP three times.

Legend: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import nn

from ckpt.engine.actions import is_placeholder
from ckpt.engine.chain_checks import why_hooked, why_random, why_replaced
from ckpt.engine.context import Settings, Surroundings
from ckpt.engine.loops import turns
from ckpt.engine.unneeded import Unneeded


@dataclass(eq=False)
class Chain:
    """Modules through which hidden states pass, token by token.

    names: of the modules, within the layer or, for what stands outside of the layers, within the model. tokens_in:
    that training forwards brought; tokens_run: through the chain, over all passes, where its ops were really run.
    """

    modules: list[nn.Module]
    names: tuple[str, ...]
    num_tiles: int = 1
    owner: nn.Module | None = None  # the layer that calls them by those names
    forwards: list = field(default_factory=list)  # the modules' own forwards
    tokens_in: int = 0
    tokens_run: int = 0
    unneeded: Unneeded = field(default_factory=Unneeded)

    def __post_init__(self):
        self.forwards = [m.forward for m in self.modules]

    def __getstate__(self):
        # A pickled bound method comes back by its name, which by then is the patched one.
        return {k: v for k, v in self.__dict__.items() if k not in ("forwards", "unneeded")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.forwards = [MethodType(type(m).forward, m) for m in self.modules]
        self.unneeded = Unneeded()

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D), all at once."""
        for forward in self.forwards:
            hidden = forward(hidden)
        return hidden

    def tile(self, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return some tokens of (B, T, D). Conv1D folds batch and tokens by `view`: slices of rows do not bear it."""
        tile = hidden[..., begin:end, :]
        return tile.contiguous() if any(type(m).__name__ == "Conv1D" for m in self.modules[0].modules()) else tile

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        found = {id(p): p for m in self.modules for p in m.parameters() if p.requires_grad}
        return list(found.values())

    def check(self) -> None:
        """Raise RuntimeError if a hook, a dropout or another module came after the tiles, with which they would be
        wrong."""
        replaced = why_replaced(self.owner, self.names, self.modules)
        for reason in (replaced, why_hooked(self.modules), *map(why_random, self.modules)):
            if reason is not None:
                what = " > ".join(self.names)
                raise RuntimeError(f"{what} runs in tiles, but {reason}. Do that before ckpt.apply, or set tile_mlp=1.")

    def bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return begin and end of each tile."""
        size = -(-num_tokens // self.num_tiles)
        return [(a, min(a + size, num_tokens)) for a in range(0, num_tokens, size)]

    @property
    def num_passes(self) -> float:
        """How often the chain ran for each token of a training forward, backward included: 2 if nothing behind it
        needs its output."""
        return self.tokens_run / self.tokens_in if self.tokens_in else 0.0


class HandThrough:
    """Instance forward of a chain's first modules: their work is done by the last one, tile by tile."""

    def __init__(self, chain: Chain, position: int):
        self._chain, self._position = chain, position

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._chain.forwards[self._position](hidden)
        self._chain.check()  # here too: the last module may be the one that is no longer called
        return hidden


class RunTiled:
    """Instance forward of a chain's last module."""

    def __init__(self, chain: Chain):
        self._chain = chain
        self._surroundings: Surroundings | None = None

    def __getstate__(self):
        return {"_chain": self._chain, "_surroundings": None}

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        chain = self._chain
        if not torch.is_grad_enabled():
            return chain.forwards[-1](hidden)
        chain.check()
        if self._surroundings is None:
            self._surroundings = Surroundings(nn.ModuleList(chain.modules))
        settings = self._surroundings.capture(hidden.device.type)
        return TiledChain.apply(chain, self._surroundings, settings, hidden, *chain.parameters())


class TiledChain(torch.autograd.Function):
    """(B, T, D) -> (B, T, D), saving only its input."""

    @staticmethod
    def forward(ctx, chain: Chain, surroundings: Surroundings, settings: Settings, hidden, *parameters):
        ctx.chain, ctx.surroundings, ctx.settings = chain, surroundings, settings
        ctx.trained = parameters
        ctx.versions = [(p, p._version) for m in chain.modules for p in m.parameters()]
        ctx.save_for_backward(hidden)
        in_backward = torch._C._current_graph_task_id() != -1
        output = None
        for begin, end in turns(chain.bounds(hidden.shape[-2]), hidden):
            tile = chain.run(chain.tile(hidden, begin, end))
            chain.tokens_in += 0 if in_backward else end - begin
            chain.tokens_run += 0 if is_placeholder(tile) else end - begin
            if output is None:
                output = tile.new_empty((*hidden.shape[:-1], tile.shape[-1]))
            output[..., begin:end, :] = tile
            del tile  # the next tile must not stand beside this one
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        chain = ctx.chain
        parameters = chain.parameters()
        if [id(p) for p in parameters] != [id(p) for p in ctx.trained]:
            raise RuntimeError("requires_grad of a tiled MLP's parameters changed between forward and backward")
        if changed := [p for p, version in ctx.versions if p._version != version]:
            raise RuntimeError(
                f"{' > '.join(chain.names)}, which runs in tiles: a parameter of shape {tuple(changed[0].shape)} was "
                "modified in place between forward and backward"
            )
        wants_hidden = ctx.needs_input_grad[3]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        totals: list[torch.Tensor | None] = [None] * len(parameters)
        situation = ctx.settings, tuple(p.requires_grad for p in parameters), wants_hidden
        with ctx.surroundings.restored(ctx.settings, hidden.device.type):
            for begin, end in turns(chain.bounds(hidden.shape[-2]), hidden):
                leaf = chain.tile(hidden, begin, end).detach().requires_grad_(wants_hidden)
                tile = chain.unneeded.run(chain.run, leaf, chain.modules, situation)
                chain.tokens_run += end - begin
                inputs = ([leaf] if wants_hidden else []) + parameters
                found = list(torch.autograd.grad(tile, inputs, gradient[..., begin:end, :], allow_unused=True))
                del tile
                if wants_hidden:
                    hidden_gradient[..., begin:end, :] = found.pop(0)
                _accumulate(totals, found, chain.num_tiles)
                del found
        gradients = [None if t is None else t.to(p.dtype) for t, p in zip(totals, parameters, strict=True)]
        return None, None, None, hidden_gradient, *gradients


def _accumulate(totals: list, found: list, num_tiles: int) -> None:
    """Sum over tiles in fp32 at least: the whole product rounds once, and so should its parts together."""
    for k, gradient in enumerate(found):
        if gradient is None:
            continue
        found[k] = None
        if totals[k] is None:
            wide = num_tiles > 1 and gradient.dtype in (torch.bfloat16, torch.float16)
            totals[k] = gradient.float() if wide else gradient
        else:
            totals[k].add_(gradient)
