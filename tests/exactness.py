"""Compare training steps under a strategy with the same steps of the plain model: loss, every gradient, random state.

    batches = [zoo.batch(model, 16, seed=0), zoo.batch(model, 16, seed=1), zoo.batch(model, 13, seed=2)]
    plain = exactness.baseline(model, batches)
    exactness.compare(model, plain, lambda m: ckpt.apply(m, "full")).raise_if_wrong()

Promise 1 (exact): bitwise unless a tolerance is given, and on every batch: what an engine learns on the first must hold on
the next (other routing, another length). Promise 3 (reversible): after undo the model is as before, attribute for
attribute. Both are checked by one call, so that no test can check one and forget the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import snapshots
import torch
import zoo
from torch import Tensor, nn

Batch = dict[str, Any]
Attach = Callable[[nn.Module], Any]
"""Puts a strategy on the model; what it returns has `undo()`, and `audit()` if it can prove what was run."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step computed. Gradients are None where autograd left None; those of the batch are named 'batch. ...'."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    random_state: Tensor


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The plain model's steps, and how the model looked after them."""

    batches: Sequence[Batch]
    steps: list[Step]
    repeatable: bool
    looks: snapshots.Snapshot
    volatile: frozenset[str]
    """Attributes that the plain model changes by itself from step to step."""
    weights: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How the steps under a strategy differ from the plain ones. `problems()` is empty when all is well."""

    loss_errors: list[float]
    """|loss - loss0| / |loss0| of each step."""
    gradient_errors: list[dict[str, float]]
    """Of each step: parameter -> norm(g - g0) / norm(g0) where they differ; infinite where one is None or not finite."""
    num_gradients: int
    tolerance: float
    random_state_moved: list[bool]
    undo_leftovers: list[str]
    weights_changed: list[str]
    audits: list[Any]
    """`handle.audit()` after each step."""

    @property
    def exact(self) -> bool:
        return self.worst_error <= self.tolerance

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient that differs most over all steps: ('', 0.0) if none does."""
        return max((item for errors in self.gradient_errors for item in errors.items()), key=lambda x: x[1], default=("", 0.0))

    @property
    def worst_error(self) -> float:
        return max([self.worst[1], *self.loss_errors])

    def problems(self) -> list[str]:
        """List everything that is wrong, the gradients that differ most first."""
        found = []
        for step, (loss_error, errors) in enumerate(zip(self.loss_errors, self.gradient_errors, strict=True), 1):
            if not loss_error <= self.tolerance:
                found.append(f"step {step}: loss differs by {loss_error:.3g} (relative)")
            wrong = sorted(((e, name) for name, e in errors.items() if not e <= self.tolerance), reverse=True)
            if wrong:
                first = ", ".join(f"{name} {error:.3g}" for error, name in wrong[:5])
                found.append(f"step {step}: {len(wrong)} of {self.num_gradients} gradients differ (relative norm): {first}")
            if self.random_state_moved[step - 1]:
                found.append(f"step {step}: the random state afterwards is another, so the next step's masks would differ")
        if self.weights_changed:
            found.append(f"state dict changed: {', '.join(self.weights_changed[:5])}")
        return found + self.undo_leftovers[:8]

    def raise_if_wrong(self, what: str = "under the strategy") -> None:
        if problems := self.problems():
            raise AssertionError(f"{what}:\n  " + "\n  ".join(problems))


def run_step(model: nn.Module, inputs: Batch, seed: int = 1) -> Step:
    """Run forward and backward once from fresh gradients and a given seed; the caller's random state is left alone."""
    inputs = _fresh(inputs)
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = loss_of(model(**inputs), inputs)
        loss.backward()
        random_state = torch.get_rng_state()
    gradients = {name: x.grad for name, x in [*model.named_parameters(), *zoo.tensors_of(inputs).items()]}
    model.zero_grad(set_to_none=True)
    return Step(loss.detach(), gradients, random_state)


def loss_of(output: Any, inputs: Batch) -> Tensor:
    """Return the model's loss; the next-token cross-entropy where the class computes none (Gemma 4's assistants)."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits, labels = output.logits[:, :-1], inputs["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def baseline(model: nn.Module, batches: Sequence[Batch]) -> Baseline:
    """Run the plain model over the batches twice: what differs between the two rounds is the model's own doing."""
    steps = _run_all(model, batches)
    first = snapshots.take(model)
    again = _run_all(model, batches)
    looks = snapshots.take(model)
    volatile = frozenset(key for key in first.keys() | looks.keys() if first.get(key) != looks.get(key))
    repeatable = not any(_loss_error(a, b) or _gradient_errors(a, b) for a, b in zip(steps, again, strict=True))
    return Baseline(batches, steps, repeatable, looks, volatile, snapshots.weights(model))


def compare(model: nn.Module, plain: Baseline, attach: Attach, *, tolerance: float = 0.0) -> Comparison:
    """Attach a strategy, run the baseline's steps, undo, and say what differs from the plain model.

    The strategy is undone even if a step raises; the exception is the caller's.
    """
    handle = attach(model)
    audits: list[Any] = []
    try:
        steps = _run_all(model, plain.batches, lambda: audits.append(handle.audit()) if hasattr(handle, "audit") else None)
    finally:
        handle.undo()
    pairs = list(zip(steps, plain.steps, strict=True))
    return Comparison(
        loss_errors=[_loss_error(step, expected) for step, expected in pairs],
        gradient_errors=[_gradient_errors(step, expected) for step, expected in pairs],
        num_gradients=len(plain.steps[0].gradients),
        tolerance=tolerance,
        random_state_moved=[not torch.equal(step.random_state, expected.random_state) for step, expected in pairs],
        undo_leftovers=snapshots.differences(plain.looks, snapshots.take(model), plain.volatile),
        weights_changed=snapshots.weight_differences(plain.weights, snapshots.weights(model)),
        audits=audits,
    )


def draws_random_numbers(model: nn.Module, inputs: Batch) -> bool:
    """Say whether the model's loss depends on the seed: dropout, routing noise or layer dropping is truly on."""
    return not torch.equal(run_step(model, inputs, 1).loss, run_step(model, inputs, 2).loss)


def _run_all(model: nn.Module, batches: Sequence[Batch], after: Callable[[], object] = lambda: None) -> list[Step]:
    steps = []
    for seed, inputs in enumerate(batches, 1):
        steps.append(run_step(model, inputs, seed))
        after()
    return steps


def _loss_error(step: Step, expected: Step) -> float:
    return _relative_error(step.loss, expected.loss)


def _gradient_errors(step: Step, expected: Step) -> dict[str, float]:
    names = step.gradients.keys() | expected.gradients.keys()
    errors = {name: _relative_error(step.gradients.get(name), expected.gradients.get(name)) for name in names}
    return {name: error for name, error in errors.items() if error}


def _relative_error(value: Tensor | None, expected: Tensor | None) -> float:
    """Return norm(value - expected) / norm(expected): 0.0 only if bitwise equal, infinite if it is no number."""
    if value is None or expected is None:
        return 0.0 if value is expected else math.inf
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return math.inf
    if torch.equal(value, expected):
        return 0.0
    size = expected.double().norm().item()
    error = (value.double() - expected.double()).norm().item() / size if size else math.inf
    return error if error > 0 else math.inf  # NaN, or a difference too small to measure


def _fresh(value: Any) -> Any:
    """Copy a batch: tensors become leaves of their own, so that no gradient of an earlier step is left on them."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _fresh(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fresh(item) for item in value)
    return value
