"""Activation checkpointing for Hugging Face causal LMs: keep, recompute or offload, tensor by tensor, exactly.

>>> import ckpt
>>> handle = ckpt.apply(model, ckpt.Selective(keep="attention"))   # doctest: +SKIP
>>> loss = model(**batch, use_cache=False).loss; loss.backward()   # doctest: +SKIP
>>> print(handle.audit()); handle.undo()                           # doctest: +SKIP
"""

from ckpt.audit import Audit
from ckpt.auto import Auto
from ckpt.flops import FlopCounter
from ckpt.ledger import Ledger, measure
from ckpt.patching import Applied, applied_to, apply
from ckpt.plan import Decision, Plan, Policy, Rule
from ckpt.predict import Prediction, predict
from ckpt.strategies import EveryN, FromPlan, Full, KeepAll, Offload, Segments, Selective
from ckpt.workload import Workload

__all__ = [
    "Applied",
    "Audit",
    "Auto",
    "Decision",
    "EveryN",
    "FlopCounter",
    "FromPlan",
    "Full",
    "KeepAll",
    "Ledger",
    "Offload",
    "Plan",
    "Policy",
    "Prediction",
    "Rule",
    "Segments",
    "Selective",
    "Workload",
    "applied_to",
    "apply",
    "measure",
    "predict",
]
