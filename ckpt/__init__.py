"""Activation checkpointing for Hugging Face causal LMs: keep, recompute or offload, tensor by tensor, exactly.

>>> import ckpt
>>> handle = ckpt.apply(model, ckpt.Selective(keep="attention"))   # doctest: +SKIP
>>> loss = model(**batch, use_cache=False).loss; loss.backward()   # doctest: +SKIP
>>> print(handle.audit()); handle.undo()                           # doctest: +SKIP
"""

from ckpt.audit import Audit
from ckpt.auto import Auto
from ckpt.patching import Applied, applied_to, apply
from ckpt.plan import Decision, Plan, Policy, Rule
from ckpt.strategies import EveryN, FromPlan, Full, KeepAll, Offload, Segments, Selective

__all__ = [
    "Applied",
    "Audit",
    "Auto",
    "Decision",
    "EveryN",
    "FromPlan",
    "Full",
    "KeepAll",
    "Offload",
    "Plan",
    "Policy",
    "Rule",
    "Segments",
    "Selective",
    "applied_to",
    "apply",
]
