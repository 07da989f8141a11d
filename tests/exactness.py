"""Compare training steps under a strategy with the same steps of the plain model: loss, every gradient, random state.

    batches = [zoo.batch(model, 16, seed=0), zoo.batch(model, 16, seed=1), zoo.batch(model, 13, seed=2)]
    plain = exactness.baseline(model, batches)
    exactness.compare(model, plain, lambda m: ckpt.apply(m, "full")).raise_if_wrong()

Promise 1 (exact): bitwise unless a tolerance is given, and on every batch: what an engine learns on the first must hold
on the next (other routing, another length). Promise 3 (reversible): after undo the model is as before, attribute for
attribute. Both are checked by one call, so that no test can check one and forget the other.
"""

from __future__ import annotations

import copy
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
    """What one step computed. Gradients are None where autograd left None; those of the batch are 'batch. ...'."""

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
    """Of each step: parameter -> norm(g - g0) / norm(g0) where they differ; infinite where one is None or no number."""
    num_gradients: int
    tolerance: float
    random_state_moved: list[bool]
    undo_leftovers: list[str]
    weights_changed: list[str]
    audits: list[Any]
    """`handle.audit()` after each step."""
    note: str = ""
    """What the handle says of itself by `note()`, if it has one."""
    sensitivities: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """Where the tolerance was not enough: see `sensitivity`."""

    def wrong(self, step: int) -> dict[str, float]:
        """Return the gradients of a step beyond the tolerance and beyond twice what rounding does to them."""
        known = self.sensitivities[step] if self.sensitivities else {}
        errors = self.gradient_errors[step]
        return {name: e for name, e in errors.items() if not e <= max(self.tolerance, 2 * known.get(name, 0.0))}

    @property
    def exact(self) -> bool:
        """True if losses and gradients are right; the random state and the undo are `problems` of their own."""
        return max(self.loss_errors) <= self.tolerance and not any(map(self.wrong, range(len(self.gradient_errors))))

    @property
    def ill_conditioned(self) -> dict[str, float]:
        """Gradients beyond the tolerance, but not beyond what rounding does to them: the largest error of each."""
        found: dict[str, float] = {}
        for step, errors in enumerate(self.gradient_errors):
            wrong = self.wrong(step)
            for name, error in errors.items():
                if error > self.tolerance and name not in wrong:
                    found[name] = max(error, found.get(name, 0.0))
        return found

    @property
    def worst(self) -> tuple[str, float]:
        """The gradient that differs most over all steps, ill-conditioned ones apart: ('', 0.0) if none does."""
        apart = self.ill_conditioned
        items = [(name, e) for errors in self.gradient_errors for name, e in errors.items() if name not in apart]
        return max(items, key=lambda item: item[1], default=("", 0.0))

    @property
    def worst_error(self) -> float:
        return max([self.worst[1], *self.loss_errors])

    def problems(self) -> list[str]:
        """List everything that is wrong, the gradients that differ most first."""
        found = []
        for step, loss_error in enumerate(self.loss_errors, 1):
            if not loss_error <= self.tolerance:
                found.append(f"step {step}: loss differs by {loss_error:.3g} (relative)")
            if wrong := sorted(((e, name) for name, e in self.wrong(step - 1).items()), reverse=True):
                first = ", ".join(f"{name} {error:.3g}" for error, name in wrong[:5])
                count = f"{len(wrong)} of {self.num_gradients} gradients differ"
                found.append(f"step {step}: {count} (relative norm): {first}")
            if self.random_state_moved[step - 1]:
                found.append(f"step {step}: the random state afterwards is another: the next masks would differ")
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

    With a tolerance, a gradient may also differ by twice what one unit in the last place of the weights changes it. The
    strategy is undone even if a step raises; the exception is the caller's.
    """
    handle = attach(model)
    audits: list[Any] = []

    def keep_audit() -> None:
        if hasattr(handle, "audit"):
            audits.append(handle.audit())

    try:
        steps = _run_all(model, plain.batches, keep_audit)
        note = handle.note() if hasattr(handle, "note") else ""
    finally:
        handle.undo()
    pairs = list(zip(steps, plain.steps, strict=True))
    gradient_errors = [_gradient_errors(step, expected) for step, expected in pairs]
    not_enough = tolerance and any(not e <= tolerance for errors in gradient_errors for e in errors.values())
    return Comparison(
        loss_errors=[_loss_error(step, expected) for step, expected in pairs],
        gradient_errors=gradient_errors,
        num_gradients=len(plain.steps[0].gradients),
        tolerance=tolerance,
        random_state_moved=[not torch.equal(step.random_state, expected.random_state) for step, expected in pairs],
        undo_leftovers=snapshots.differences(plain.looks, snapshots.take(model), plain.volatile),
        weights_changed=snapshots.weight_differences(plain.weights, snapshots.weights(model)),
        audits=audits,
        note=note,
        sensitivities=sensitivity(model, plain) if not_enough else [],
    )


@torch.no_grad()
def sensitivity(model: nn.Module, plain: Baseline, rounds: int = 8) -> list[dict[str, float]]:
    """Return, of each step, how much the plain gradients change if every weight moves by one unit in the last place.

    The largest relative change over `rounds` random choices of sign. No order of summation can be expected to agree
    better: a gradient that is a small difference of large sums is not known more precisely than that.
    """
    found: list[dict[str, float]] = [{} for _ in plain.steps]
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        moved = copy.deepcopy(model)
        for parameter in moved.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, signs * torch.inf))
        with torch.enable_grad():
            steps = _run_all(moved, plain.batches)
        for largest, step, expected in zip(found, steps, plain.steps, strict=True):
            for name, error in _gradient_errors(step, expected).items():
                largest[name] = max(error, largest.get(name, 0.0))
    return found


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
    return _mapped(value, lambda x: x.detach().clone().requires_grad_(x.requires_grad))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    return value
