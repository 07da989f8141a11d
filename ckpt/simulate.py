"""Run real training steps on fake tensors: the model, the engine and the optimizer as they are, without the memory.

Owns the fake model and which of its layers are run; what comes out are `Trace`s. `predict` (`ckpt/predict.py`) reads
them, the solver runs many.

    simulator = Simulator(model_or_config, Workload(batch_size=1, seq_len=8192))    # once: builds the fake model
    ran = simulator.run("full")                 # a strategy, its name, a Policy, a Plan, or None: the model as it is
    ran.peak_bytes, ran.steady.total.max()      # (N,) bytes alive over a step
    ran.programs[5].record.ops                  # ops of layer 5: keys, bytes, FLOPs, as a policy is asked about them
    ckpt.predict(simulator, "full", hardware="h100")     # the Prediction, with nothing built again

A run makes two optimizer steps, because the first is not like the others: it records layers and makes optimizer states.
Layers that do the same are run once and counted as often as they stand (`ckpt/reduce.py`), unless `reduce=False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from ckpt import attention
from ckpt.attention.families import layer_types
from ckpt.audit import Audit
from ckpt.choose_tiles import choose_tiles
from ckpt.engine.program import Program
from ckpt.fake import Always, FakeMode, fake_copy, naming_refusals, real_path
from ckpt.fake_batch import fake_batches, is_padded, restarts
from ckpt.fake_step import LayerMarks, traced_step
from ckpt.layers import find_layers, unwrapped
from ckpt.optimizers import make_optimizer
from ckpt.patching import Applied, applied_to, apply, resolve
from ckpt.plan import Policy
from ckpt.positions import check_positions
from ckpt.precision import Precision, local_part, prepare
from ckpt.reduce import Chosen, choose_layers, policy_keys, structure_keys
from ckpt.timeline import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from ckpt.trace import Trace
from ckpt.workload import Workload

if TYPE_CHECKING:
    from ckpt.parallel.simulated import FakeRanks

_ONE = Always(1.0)


@dataclass(frozen=True)
class Simulated:
    """Two optimizer steps under one policy.

    first: the step that records. steady: every later one. programs: by layer, what replays it (layers that are not
    replayed have none). audit: of the layers that were run, by their place among these. policy: in force; None: the
    model as it is. layer_kinds: by layer, what the config calls it, else its class. num_layers_run: how many layers
    were run.
    """

    first: Trace
    steady: Trace
    programs: dict[int, Program]
    audit: Audit | None
    policy: Policy | None
    layer_kinds: tuple[str, ...]
    num_layers_run: int

    @property
    def policy_name(self) -> str | None:
        """Name of the policy that was asked for."""
        return getattr(self.policy, "name", None)

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.layer_kinds)

    @property
    def peak_bytes(self) -> int:
        """The higher of the two steps' peaks. The first step's update holds nothing that later ones do not."""
        return max(int(self.steady.total.max()), int(self.first.total[self.first.before_optimizer].max()))


class Simulator:
    """A fake model and its workload, ready to run steps under any policy.

    model: a module (left as it is), a Transformers config, or a module on meta. inputs: keyword arguments of the
    forward, for models that need others than tokens and labels; tensors of any device, of which shapes count, and
    values where masks are made of them (attention_mask, position_ids; not on meta). reduce: run equal layers once.

    Raises ValueError for a model that cannot be built or made fake, and for a family that packing is refused for.
    """

    def __init__(
        self,
        model: nn.Module | PreTrainedConfig,
        work: Workload,
        *,
        inputs: Mapping[str, Any] | None = None,
        reduce: bool = True,
    ):
        if not isinstance(work, Workload):
            raise ValueError(f"a prediction needs a ckpt.Workload, got {type(work).__name__}")
        if inputs is not None and not isinstance(inputs, Mapping):
            raise ValueError(f"inputs must be the forward's arguments by name, got {type(inputs).__name__}")
        self.work = work
        self.mode = FakeMode()
        self.model = fake_copy(model, self.mode)
        self._refuse(inputs)
        self._ranks: FakeRanks | None = None
        self._as_it_is: Applied | None = applied_to(self.model)
        if work.packing == "isolate" and not _is_packed(self.model):
            attention.prepare(self.model, "isolate")
        if work.num_ranks > 1:
            from ckpt.parallel.simulated import FakeRanks

            self._ranks = FakeRanks(work.mesh)  # outside the fake mode: meshes are made of real tensors
        self._inputs = inputs
        self._masks = (work.packing != "isolate" and not restarts(inputs), is_padded(inputs))
        try:
            self._batches = self._make_batches()
            with self.mode:
                self.precision = self._spread()
        except BaseException:
            self.close()
            raise
        self.layers = find_layers(self.model)
        self._holder = _holder_of(self.model, [layer.module for layer in self.layers])
        config = getattr(unwrapped(self.model), "config", None)
        can_reduce = reduce and self._holder is not None and config is not None and not callable(work.optimizer)
        self._structure = structure_keys(self.layers, config.get_text_config(decoder=True)) if can_reduce else None
        self._marks = LayerMarks(self.layers)
        said = layer_types(config.get_text_config(decoder=True)) if config is not None else []
        self.layer_kinds = tuple(said if len(said) == len(self.layers) else (layer.kind for layer in self.layers))

    def _refuse(self, inputs: Mapping[str, Any] | None) -> None:
        """Raise ValueError for what a real step would fail at and a fake one might not."""
        if inputs is None:
            check_positions(self.model, self.work)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained and (self.work.optimizer is not None or inputs is None):
            raise ValueError(
                f"no parameter of this {type(unwrapped(self.model)).__name__} is trained: requires_grad is False for "
                "all. Unfreeze some; or with optimizer=None give inputs= that need gradients."
            )

    def _spread(self) -> Precision:
        """Cast the model and, for a mesh, spread it over the ranks, of which this is one."""
        work = self.work
        if self._ranks is None:
            # Without an optimizer nothing reads master weights, so there are none.
            return prepare(self.model, "bf16_pure" if work.dtype == "bf16" and not work.optimizer else work.dtype)
        from ckpt.parallel.simulated import spread

        return spread(self.model, self._ranks.layout, work)

    def _make_batches(self) -> list[dict[str, Any]]:
        batches = fake_batches(self.work, self.mode, self._inputs)
        if self._ranks is None:
            return batches
        from ckpt.parallel.ulysses import shard_sequence

        with self.mode:
            return [shard_sequence(batch, self._ranks.layout) for batch in batches]

    @contextmanager
    def at_length(self, seq_len: int) -> Iterator[Simulator]:
        """Within it, steps have another sequence length; nothing else is built again.

        Raises ValueError for a simulator with inputs of its own: their shapes say how long they are.
        """
        if self._inputs is not None:
            raise ValueError("a Simulator with inputs= has their length; make another one with other inputs")
        before = self.work, self._batches
        try:
            self.work = self.work.replace(seq_len=seq_len)
            check_positions(self.model, self.work)
            self._batches = self._make_batches()
            yield self
        finally:
            self.work, self._batches = before

    def close(self) -> None:
        """Take down the simulated ranks of a workload with a mesh; the simulator cannot be used afterwards."""
        if self._ranks is not None:
            self._ranks.close()

    def run(self, strategy: Any, *, loss: str | None = None, tile_mlp: int | str | None = None) -> Simulated:
        """Make two optimizer steps under a strategy (anything that `ckpt.apply` takes), or None: the model as it is.

        loss, tile_mlp: in place of the workload's. Raises ValueError for a strategy that does not fit the model, and
        for a forward that asks for the values of tensors, naming op and line.
        """
        policy = None
        if strategy is not None:
            if self._as_it_is is not None:
                self._as_it_is.undo()
                self._as_it_is = None
            policy = resolve(strategy, self.model, self.work)
        asked = {"loss": loss or self.work.loss, "tile_mlp": tile_mlp or self.work.tile_mlp}
        settings = {name: getattr(policy, name, None) or value for name, value in asked.items()}  # as `apply` does
        if settings["tile_mlp"] == "auto":
            settings["tile_mlp"] = 1 if policy is None else choose_tiles(self, policy, settings["loss"])
        chosen = self._choose(policy if self._as_it_is is None else self._as_it_is.policy)
        if chosen is not None:
            try:
                with self._only(chosen.kept):
                    ran = self._run(policy, settings, chosen)
            except (IndexError, KeyError):
                ran = None  # a forward that looks its layers up in a way that a shortened model does not bear
            if ran is not None:
                return ran
        return self._run(policy, settings, None)

    def _choose(self, policy: Policy | None) -> Chosen | None:
        if self._structure is None:
            return None
        keys = [None] * len(self.layers) if policy is None else policy_keys(policy, len(self.layers))
        gathers_ahead = self._ranks is not None and self._ranks.layout.degrees.shards_parameters
        return None if keys is None else choose_layers(self._structure, keys, gathers_ahead)

    @contextmanager
    def _only(self, kept: Sequence[int]) -> Iterator[None]:
        """Leave all other layers out of the model."""
        modules = self._holder._modules
        everything = dict(modules)
        modules.clear()
        modules |= {str(place): self.layers[index].module for place, index in enumerate(kept)}
        try:
            yield
        finally:
            modules.clear()
            modules |= everything

    def _run(self, policy: Policy | None, settings: dict[str, Any], chosen: Chosen | None) -> Simulated | None:
        kept = range(len(self.layers)) if chosen is None else chosen.kept
        places = {index: place for place, index in enumerate(kept)}
        with ExitStack() as stack:
            stack.enter_context(naming_refusals())
            stack.enter_context(self.mode)
            stack.enter_context(real_path(self.mode, *self._masks))
            stack.callback(self.precision.zero_grad)
            handle = self._as_it_is
            if policy is not None:
                shown = policy if chosen is None else _Reduced(policy, kept, len(self.layers))
                handle = apply(self.model, shown, self.work, **settings)
                stack.callback(handle.undo)
            precision = self.precision.within(self.model)  # without the layers that are left out
            optimizer = self._optimizer(precision)
            if self.work.hold_gradients:
                for _, parameter in precision.named_parameters():
                    parameter.grad = torch.zeros_like(parameter)
            steps = [self._step(precision, optimizer, places, chosen) for _ in range(2)]
            if None in steps:
                return None
            audit = None if handle is None else handle.audit()
            latest = {} if handle is None else {region.index: region.latest for region in handle.regions}
        # The regions of a patch that the model came with know their layers by the numbers of the whole model.
        number = (
            {place: index for index, place in places.items()} if policy is None else dict(enumerate(range(len(kept))))
        )
        sources = range(len(self.layers)) if chosen is None else chosen.sources
        programs = {index: latest.get(number[place]) for index, place in enumerate(sources)}
        return Simulated(
            *steps,
            programs={index: program for index, program in programs.items() if program is not None},
            audit=audit,
            policy=policy if self._as_it_is is None else self._as_it_is.policy,
            layer_kinds=self.layer_kinds,
            num_layers_run=len(kept),
        )

    def _optimizer(self, precision: Precision) -> torch.optim.Optimizer | None:
        if self.work.optimizer is None:
            return None
        optimizer = make_optimizer(self.work.optimizer, [p for _, p in precision.named_parameters()])
        # Adafactor reads step counts and norms: they decide about factors, not about memory.
        optimizer.register_step_pre_hook(lambda *_: self.mode.push(_ONE))
        optimizer.register_step_post_hook(lambda *_: self.mode.pop(_ONE))
        return optimizer

    def _step(
        self, precision: Precision, optimizer: Any, places: Mapping[int, int], chosen: Chosen | None
    ) -> Trace | None:
        missing = np.zeros(5, dtype=np.int64)
        if chosen is not None:
            for repeat in chosen.repeats:
                for place in range(repeat.first, repeat.first + repeat.period):
                    module = self.layers[chosen.kept[place]].module
                    missing += repeat.copies * self._held_bytes(module, optimizer)
        trace = traced_step(
            self.model, self._batches, optimizer, precision, self.work.hold_gradients, self._marks, places
        )
        if chosen is None:
            return trace
        whole, part = (sum(p.numel() for _, p in of.named_parameters()) for of in (self.precision, precision))
        # A step ends as it began, but for optimizer states that the first one makes; those do not bear on its own peak.
        return trace.repeat(chosen.repeats, missing, trace.start + missing, optimizer_share=whole / max(part, 1))

    def _held_bytes(self, layer: nn.Module, optimizer: Any) -> np.ndarray:
        """(5,) bytes that a layer holds between steps."""
        held = np.zeros(5, dtype=np.int64)
        held[PARAMETERS] = _bytes_of([*layer.parameters(), *layer.buffers()])
        precision = self.precision.within(layer)
        held[OPTIMIZER_STATE] = _bytes_of(precision.masters.values())
        for _, trained in precision.named_parameters():
            held[GRADIENTS] += 0 if trained.grad is None else _bytes_of([trained.grad])
            state = {} if optimizer is None else optimizer.state.get(trained, {})
            held[OPTIMIZER_STATE] += _bytes_of(t for t in state.values() if isinstance(t, torch.Tensor))
        return held


class _Reduced:
    """A policy for the whole model, asked about the layers that are left of it."""

    def __init__(self, policy: Policy, kept: Sequence[int], num_layers: int):
        self.name = policy.name
        self.offload = getattr(policy, "offload", None)
        self._policy, self._kept, self._num_layers = policy, tuple(kept), num_layers

    def rule(self, index: int, num_layers: int):
        return self._policy.rule(self._kept[index], self._num_layers)

    def decide(self, index: int, op: Any):
        return self._policy.decide(self._kept[index], op)

    def complaint(self, seen, matched, dynamic) -> str | None:
        whole = self._kept
        return self._policy.complaint(
            {whole[i]: keys for i, keys in seen.items()},
            {whole[i]: count for i, count in matched.items()},
            {whole[i] for i in dynamic},
        )


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes on this rank: of a sharded tensor its part."""
    local = map(local_part, tensors)
    return sum(t.numel() * t.element_size() for t in local)


def _holder_of(model: nn.Module, layers: list[nn.Module]) -> nn.ModuleList | None:
    """Return the list whose items are the layers, in order; None if they stand otherwise."""
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return next((m for m in lists if len(m) == len(layers) and all(map(lambda a, b: a is b, m, layers))), None)


def _is_packed(model: nn.Module) -> bool:
    configs = (vars(module).get("config") for module in model.modules())
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return any(name in (attention.NAME, attention.NAME_EAGER) for name in names)
