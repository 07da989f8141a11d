"""Tell torch.compile's partitioner, node by node, what a policy keeps.

The saved-tensor hooks of the eager engine mean nothing to a compiler; it takes a tag on each node of the forward
graph instead: save, or run again in backward. Tags are set while the layer is traced, by the policy function of torch's
selective contexts (torch 2.11 to 2.14 read what it returns as tags when they compile, and use no context at run time).
Owns the view of a traced op that a policy decides on. Knows no layer and no model.

    tags = Tags(policy); checkpoint(function, *args, use_reentrant=False, context_fn=tags.contexts)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx.traceback
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckpt.engine.keys import OpKey, canonical_op, canonical_path
from ckpt.engine.ops import IGNORED
from ckpt.engine.record import Op, TensorMeta
from ckpt.flops import op_flops
from ckpt.plan import Decision, Policy

NOT_COMPILED = (
    "a layer that was to be compiled runs eagerly: torch.compile could not capture it in one graph, compiled it too "
    "often (TORCH_LOGS=graph_breaks,recompiles says where), or is switched off. Use compile=False, or strategy none."
)


class Tags:
    """The decisions of one policy, as they are asked for while layers are traced.

    decisions: of the latest traced layer, by key. num_traced: how many layers were traced; equal ones are traced once.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.decisions: dict[OpKey, Decision] = {}
        self.seen: set[OpKey] = set()
        self.matched = 0
        self.num_traced = 0

    def contexts(self) -> tuple[Any, Any]:
        """Return the pair of contexts that torch's checkpoint asks for.

        Raises RuntimeError outside a trace: as run-time contexts they give wrong gradients where a kept output is
        written in place through a view (gemma3n, torch 2.13), so nothing may run under them.
        """
        if TracingContext.try_get() is None:
            raise RuntimeError(NOT_COMPILED)
        self.num_traced += 1
        self.decisions = {}
        return create_selective_checkpoint_contexts(_Tagger(self))

    def decide(self, op: Op) -> Decision:
        """Ask the policy about one op, and remember the answer. A policy that is lowered does not look at the layer."""
        decision = self.policy.decide(0, op) or Decision.RECOMPUTE
        self.seen.add(op.key)
        self.decisions[op.key] = decision
        self.matched += decision is Decision.KEEP
        return decision


class _Tagger:
    """The policy function of one traced layer: names its ops as the eager record does."""

    def __init__(self, tags: Tags):
        self._tags = tags
        self._calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in IGNORED:
            return CheckpointPolicy.MUST_RECOMPUTE
        path, name = _module_path(), canonical_op(func)
        key = OpKey(path, name, self._calls[path, name])
        self._calls[path, name] += 1
        op = _op_of(key, func, args, kwargs, context)
        keep = bool(op.num_bytes) and self._tags.decide(op) is Decision.KEEP
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.MUST_RECOMPUTE


def _module_path() -> str:
    """Return the path, within the layer, of the module whose code is being traced.

    Dynamo names modules from the frame it compiles: `L['self'].self_attn.q_proj` where that is the layer's.
    """
    stack = torch.fx.traceback.get_current_meta().get("nn_module_stack") or {}
    name = next(reversed(stack.values()))[0] if stack else ""
    return canonical_path(re.sub(r"^L\[['\"]self['\"]\]\.?", "", name))


def _op_of(key: OpKey, func: Any, args: tuple, kwargs: Mapping[str, Any], context: Any) -> Op:
    """Describe a traced op. Sizes that vary count with the value they have in this trace; reading it sets no guard."""
    with _disable_current_modes():  # else these stand-ins would become nodes of the graph
        args, kwargs = (tree_map_only(Tensor, _stand_in, tree) for tree in (args, dict(kwargs)))
        if hasattr(context, "op_output"):
            out = tree_map_only(Tensor, _stand_in, context.op_output)
        else:  # torch 2.11 asks before it runs the op
            out = func(*args, **kwargs)
        leaves = list(out) if isinstance(out, (tuple, list)) else [out]
        outputs = tuple(TensorMeta.of(t, i) if isinstance(t, Tensor) else None for i, t in enumerate(leaves))
        made = () if _returns_alias(func) else tuple(i for i, meta in enumerate(outputs) if meta is not None)
        return Op(
            index=-1,
            key=key,
            func=func,
            reads=(),
            outputs=outputs,
            makes=made,
            writes=(),
            single_output=isinstance(out, Tensor),
            is_random=torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()),
            is_data_dependent=False,
            flops=op_flops(func, args, kwargs, out),
            num_bytes=sum(leaves[i].numel() * leaves[i].element_size() for i in made),
            contraction=args[-1].shape[-2] if key.op in ("bmm", "baddbmm") else 0,
        )


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor on meta of the same (present) sizes."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape]
    return torch.empty([0 if size is None else int(size) for size in sizes], dtype=tensor.dtype, device="meta")


def _returns_alias(func: Any) -> bool:
    """True for views and ops in place: they make no storage."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)
