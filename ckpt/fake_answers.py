"""What a model that decides by values is told on fake tensors: how tokens choose experts, how long the row is.

Owns the assumptions about values, one class each, and their hooks on a fake model. Knows the modules by name only.

    hook_answers(model, mode)          # model: a fake copy, which keeps its hooks

`balanced` routing: every expert is chosen, and each by equally many tokens. Experts that run one by one (a loop over
`nonzero` of the routing mask, as transformers' eager experts do) then see N * k / E tokens each: N tokens, k experts a
token, E experts. Grouped matmuls never ask.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

aten = torch.ops.aten

_EXPERTS = re.compile(r"expert|moe|mixture", re.IGNORECASE)
_ROTARY = re.compile(r"rotary", re.IGNORECASE)


class Balanced:
    """Answers inside a module of experts."""

    def __init__(self, module: nn.Module):
        self.num_experts = getattr(module, "num_experts", None)

    def op(self, func: Any, args: tuple) -> torch.Tensor | None:
        """Return the indices that `nonzero` finds in a routing mask; None for any other op."""
        if func is not aten.nonzero.default:
            return None
        mask = args[0]
        if mask.dim() == 1:  # which experts are chosen; some masks have a place more, for tokens of other ranks
            count = min(mask.shape[0], self.num_experts or mask.shape[0])
            self.num_experts = count
        else:
            count = max(1, mask.numel() // (self.num_experts or 1))
        return torch.empty(count, mask.dim(), dtype=torch.long, device=mask.device)

    def value(self, tensor: torch.Tensor) -> bool | int | None:
        """An expert's number (they are all alike), or that it is no stand-in for other ranks' experts."""
        if tensor.dtype == torch.bool:
            return False
        return None if tensor.is_floating_point() else 0


class Sizes:
    """Answers inside a router that hands out the number of tokens of each expert as a list (JetMoE)."""

    def __init__(self, module: nn.Module):
        self._num_experts, self._top_k = module.num_experts, module.top_k
        self._total = self._asked = 0

    def begin(self, hidden_states: torch.Tensor) -> None:
        """Note how many tokens are routed."""
        self._total, self._asked = hidden_states.shape[0] * self._top_k, 0

    def op(self, func: Any, args: tuple) -> None:
        """No op is answered."""

    def value(self, tensor: torch.Tensor) -> int:
        """The sizes in turn; they add up to all tokens."""
        share, rest = divmod(self._total, self._num_experts)
        self._asked += 1
        return share + (self._asked <= rest)


class Positions:
    """Answers inside a rotary embedding, which may stretch with the longest position (dynamic and LongRoPE scaling)."""

    def op(self, func: Any, args: tuple) -> torch.Tensor | None:
        """Return the last position of a row that holds one document."""
        if func is aten.max.default and not args[0].is_floating_point():
            return torch.tensor(args[0].shape[-1] - 1)
        return None

    def value(self, tensor: torch.Tensor) -> None:
        """Nothing: what follows from the position is known by then."""
        return None


def hook_answers(model: nn.Module, mode: Any) -> None:
    """Give answers while the forward of a module that asks is under way, also where a layer is run again."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("TopKGating"):
            answers = Sizes(module)
            module.register_forward_pre_hook(lambda _, args, a=answers: a.begin(args[0]))
        elif _EXPERTS.search(name):
            answers = Balanced(module)
        else:
            answers = Positions() if _ROTARY.search(name) else None
        if answers is not None:
            module.register_forward_pre_hook(lambda *_, a=answers: mode.push(a))
            module.register_forward_hook(lambda *_, a=answers: mode.pop(a), always_call=True)
