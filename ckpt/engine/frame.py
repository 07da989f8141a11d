"""One call of one decoder layer: what it packs in forward, and how it answers backward.

The forward runs under `saved_tensors_hooks` without a dispatch mode. `pack` decides by its running number: a dropped
tensor is replaced by that number, so it is always exact to replay the layer and take the n-th saved tensor. Kept
tensors only make the replay cheaper; whenever a call turns out to differ from its record, it is replayed plainly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckpt.engine.actions import Mismatch, same_storage
from ckpt.engine.bypass import python_functions
from ckpt.engine.call import Call
from ckpt.engine.context import GeneratorStates, Settings, generators
from ckpt.engine.gathered import gathered
from ckpt.engine.modes import Capture, Replay
from ckpt.engine.outside import Unwritten, WriteNothingOutside
from ckpt.engine.program import Pack, Program, Source, Stage
from ckpt.engine.ranges import named
from ckpt.engine.record import Op, Record, Recorder, TensorMeta
from ckpt.engine.store import Group, Ticket
from ckpt.plan import Decision

if TYPE_CHECKING:
    from ckpt.engine.region import Region

PASS, KEEP, DROP, FEED = Pack.PASS, Pack.KEEP, Pack.DROP, Pack.FEED


class NondeterministicLayer(RuntimeError):
    """A replay saved other tensors than the forward did."""


class _Finished(BaseException):
    """Everything asked for has been made. No Exception, so that no layer catches it."""


class _Late:
    """A saved tensor of a recorded call, whose fate is known when the call ends."""

    __slots__ = ("n", "value", "version", "away")

    def __init__(self, n: int, value: torch.Tensor):
        self.n, self.value, self.version, self.away = n, value, value._version, None


class _Away:
    """A saved tensor whose storage is off the device."""

    __slots__ = ("_ticket", "_geometry")

    def __init__(self, ticket: Ticket, tensor: torch.Tensor):
        self._ticket = ticket
        self._geometry = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def fetch(self) -> torch.Tensor:
        return self._ticket.view(*self._geometry)


class Frame:
    """State of one layer call between its forward and the end of its backward."""

    def __init__(self, region: Region, call: Call, settings: Settings, program: Program | None):
        self.region = region
        self.call = call
        self.settings = settings
        self.program = program
        self.rng: GeneratorStates | None = None
        self.count = 0  # tensors packed
        self.held: dict[int, tuple[torch.Tensor, int]] = {}  # storage -> (tensor, version), what replays are fed with
        self._tickets: dict[int, Ticket] = {}  # storage -> what is held off the device
        self._group: Group | None = None  # of `_tickets`
        self._late: list[_Late] = []
        self._candidates: dict[int, torch.Tensor] = {}  # storage -> output, while recording
        self._state: list[tuple[torch.Tensor, int, int | None]] = []  # parameter or buffer, version, storage number
        self.unwritten = Unwritten()
        self._made: dict[int, torch.Tensor] = {}  # pack number -> replayed tensor, until backward takes it
        self._given: dict[int, weakref.ref] = {}
        self._shapes: list | None = None if program is None else [(s.shape, s.dtype) for s in program.record.saved]
        self._stages_left = 0 if program is None else len(program.stages)

    # ---- forward -----------------------------------------------------------------------------------------------

    def run(self):
        """Run the layer by its program. Return its output."""
        program = self.program
        self.rng = GeneratorStates.capture(self.call.device)
        with saved_tensors_hooks(self._pack, self._unpack), self._capturing():
            output = self.call.first()
        if self.program is not None and self.count != len(program.packs):
            self._distrust("a call saved other tensors than the recorded one")
        if not program.record.has_random and not self._forget_unused_generators():
            self._distrust("a call drew random numbers that the recorded one did not")
        self._watch_state(program.record)
        # Captured outputs may have been written in place since; that they end as they are now is what the record says.
        self.held = {storage: (tensor, tensor._version) for storage, (tensor, _) in self.held.items()}
        return output

    def _forget_unused_generators(self) -> bool:
        """Let go of the generators' states if the layer left them as they were."""
        if not self.rng.equals(GeneratorStates.capture(self.call.device)):
            return False
        self.rng = None
        return True

    def _watch_state(self, record: Record) -> None:
        """Note the versions of the layer's parameters and buffers as it left them."""
        state = self.region.surroundings.state()
        if len(state) == len(record.state):
            self._state = [(t, t._version, s) for t, s in zip(state, record.state, strict=True)]

    def record(self, decide):
        """Run the layer while recording it. `decide(op) -> Decision` says what to do with an op's outputs.

        Return (output, record, decisions by op index). The caller builds the program and calls `settle`."""
        self.rng = GeneratorStates.capture(self.call.device)
        decisions: dict[int, Decision] = {}
        held = self._candidates

        def on_output(op: Op, out):
            decisions[op.index] = decide(op)
            if decisions[op.index] is not Decision.RECOMPUTE:
                for meta, tensor in zip(op.outputs, [out] if op.single_output else out, strict=True):
                    if meta is not None and meta.storage in op.makes:
                        held.setdefault(meta.storage, tensor.detach())

        def on_input(storage: int, tensor: torch.Tensor):
            held.setdefault(storage, tensor.detach())

        inputs = self.call.tensors()
        recorder = Recorder(self.region.layer, inputs, on_output, on_input if self.region.has_middle else None)

        def pack(tensor: torch.Tensor):
            recorder.saved(tensor)
            late = _Late(self.count, tensor.detach() if not tensor.is_leaf else tensor)
            self.count += 1
            self._late.append(late)
            return late

        with saved_tensors_hooks(pack, self._unpack), recorder:
            output = self.call.first()
        record = recorder.finish(self.region.surroundings.state())
        record.custom_functions = python_functions(output, inputs)
        return output, record, decisions

    def settle(self, program: Program) -> None:
        """Keep and drop what the program says of a recorded call."""
        self.program = program
        self._shapes = [(s.shape, s.dtype) for s in program.record.saved]
        self._stages_left = len(program.stages)
        for late, code in zip(self._late, program.packs, strict=True):
            storage = program.record.saved[late.n].storage
            if code is DROP:
                late.value = None
            elif code is not PASS and storage in program.away:
                late.away, late.value = self._send_away(storage, late.value), None
            elif code is FEED:
                self.hold(storage, late.value)
        for storage in program.captures:
            self.hold(storage, self._candidates[storage])
        self._late = []
        # Emptied, not replaced: autograd holds the recording hooks, and through them this dict, until backward.
        self._candidates.clear()
        self._watch_state(program.record)
        if not program.record.has_random:
            self._forget_unused_generators()

    def _pack(self, tensor: torch.Tensor):
        n = self.count
        self.count = n + 1
        program = self.program
        if program is None:
            return self._pack_loosely(n, tensor)
        if n >= len(program.packs) or self._shapes[n] != (tensor.shape, tensor.dtype):
            self._distrust("a call saved other tensors than the recorded one")
            return self._pack_loosely(n, tensor)
        code = program.packs[n]
        if code is DROP:
            return n
        version = tensor._version
        value = tensor if tensor.is_leaf else tensor.detach()
        if code is not PASS and program.away:
            storage = program.record.saved[n].storage
            if storage in program.away:
                return self._send_away(storage, value)
        if code is FEED:
            self.hold(program.record.saved[n].storage, value)
        return value, version

    def _pack_loosely(self, n: int, tensor: torch.Tensor):
        """Without a program: parameters pass, all else is replayed."""
        return (tensor, tensor._version) if isinstance(tensor, torch.nn.Parameter) else n

    def _distrust(self, reason: str) -> None:
        """This call is not the recorded one. What was kept stays valid for its own unpack; nothing is fed any more."""
        self.program = None
        self.held.clear()
        self.region.becomes_dynamic(reason)

    def hold(self, storage: int, tensor: torch.Tensor) -> None:
        """Hold a storage to feed replays with, on the device or off it as the program says."""
        if self.program is None:
            return  # this call was found to differ from its record
        if storage in self.program.away:
            self._send_away(storage, tensor)
        else:
            self.held.setdefault(storage, (tensor, tensor._version))

    def send_input_away(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send the layer's input off the device; return what brings it back."""
        store = self.region.store
        away, needs_grad = _Away(store.put(tensor, store.open_group()), tensor), tensor.requires_grad
        return lambda: away.fetch().requires_grad_(needs_grad)

    def _send_away(self, storage: int, tensor: torch.Tensor) -> _Away:
        if storage not in self._tickets:
            if self._group is None:  # after the input's, as backward asks for the kept ones first
                self._group = self.region.store.open_group()
            self._tickets[storage] = self.region.store.put(tensor, self._group)
        return _Away(self._tickets[storage], tensor)

    def _bring_back(self, stage: Stage) -> bool:
        """Hold on the device what the stage is fed with. False if some of it is gone."""
        for storage in stage.fed_storages - self.held.keys():
            if storage not in self._tickets:
                return False
            record = self.program.record
            made = record.ops[record.producer[storage]].outputs
            dtype = next(o.dtype for o in made if o is not None and o.storage == storage)
            flat = self._tickets[storage].fetch().view(dtype)
            self.held[storage] = flat, flat._version
        return True

    def _let_go(self, stage: Stage) -> None:
        """After a stage: what was brought back for it need not stay; after the last, nothing need."""
        self._stages_left -= 1
        for storage in stage.fed_storages & self._tickets.keys():
            self.held.pop(storage, None)
        if self._stages_left <= 0:
            self.held.clear()
            self._tickets.clear()

    def held_as(self, meta: TensorMeta) -> torch.Tensor:
        """Return the held storage as the tensor that the recorded op returned."""
        tensor, version = self.held[meta.storage]
        self._check_version(tensor, version)
        return tensor.as_strided(meta.shape, meta.stride, meta.offset)

    def is_held(self, storage: int, tensor: torch.Tensor) -> bool:
        """True if `tensor` lies in what is held of the record's storage of that number."""
        return same_storage(self.held[storage][0], tensor)

    @contextmanager
    def _capturing(self):
        """Hold outputs that autograd does not save: by a hook on the module that returns them, else by a mode."""
        captures = self.program.captures
        if not captures:
            yield
        elif None not in captures.values():
            hooks = [self._capture(storage, source) for storage, source in captures.items()]
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()
        else:
            with Capture(self, self.program):
                yield

    def _capture(self, storage: int, source: Source):
        """Hook a module so that what it returns, or is called with, is held. First of the module's hooks, as the
        recorder was: later ones may make something else of it."""
        module = self.region.layer.get_submodule(source.module)
        if source.is_input:
            return module.register_forward_pre_hook(
                lambda module, args: self.hold(storage, args[0].detach()), prepend=True
            )
        return module.register_forward_hook(
            lambda module, args, output: self.hold(storage, output.detach()), prepend=True
        )

    # ---- backward ----------------------------------------------------------------------------------------------

    def _unpack(self, packed):
        if type(packed) is int:
            return self.fetch(packed)
        if type(packed) is _Late:
            if packed.away is not None:
                return packed.away.fetch()
            if packed.value is None:
                return self.fetch(packed.n)
            self._check_version(packed.value, packed.version)
            return packed.value
        if type(packed) is _Away:
            return packed.fetch()
        self._check_version(*packed)
        return packed[0]

    def _check_version(self, tensor: torch.Tensor, version: int) -> None:
        if tensor._version != version:
            raise RuntimeError(
                f"{self.region.name}: a tensor of shape {tuple(tensor.shape)} that backward needs was modified in place"
                f" after the layer ran (version {tensor._version}, expected {version})"
            )

    def fetch(self, n: int) -> torch.Tensor:
        """Return the n-th saved tensor of this call, replaying what is needed to make it."""
        given = self._given.get(n)
        tensor = given() if given is not None else None
        if tensor is not None:
            return tensor
        if n not in self._made:
            self._replay_for(n)
        tensor = self._made.pop(n)
        self._given[n] = weakref.ref(tensor)
        return tensor

    def _replay_for(self, n: int) -> None:
        self.call.prepare()
        if n in self._made:  # a segment collected it while it made our argument
            return
        program = self.program
        if program is not None:
            stage = program.stages[program.stage_of[n]]
            if self._bring_back(stage):
                try:
                    self.replay(stage)
                except Mismatch:
                    self._made.clear()
                    self.region.becomes_dynamic("a replay ran other ops than the recorded call")
                else:
                    self._let_go(stage)
                    return
        self.replay(None)

    def replay(self, stage: Stage | None, to_the_end: bool = False):
        """Run the layer again and collect saved tensors: of a stage, or (None) all that were dropped.

        Return the output if `to_the_end`."""
        region, made, output, program = self.region, self._made, None, self.program
        packs = None if program is None else program.packs
        mode = Replay(self, stage) if stage is not None and stage.needs_mode else self._shield(stage)
        self._check_unchanged(stage)
        if stage is not None:
            wanted, last = stage.wanted, stage.last
        elif packs is not None:
            wanted = {n for n, code in enumerate(packs) if code is DROP}
            last = max(wanted, default=-1)
        else:
            wanted, last = None, self.count - 1
        count = -1

        def pack(tensor: torch.Tensor):
            nonlocal count
            count += 1
            if wanted is None or count in wanted:
                if packs is not None and self._shapes[count] != (tensor.shape, tensor.dtype):
                    raise NondeterministicLayer(self._differs(count, tensor))
                made[count] = tensor.detach()
            if stage is not None and stage.needs_mode:
                mode.check_saved(count, tensor)
            if count == last and not to_the_end:
                raise _Finished
            # The graph of a replay never runs; returning the tensor would tie nodes and outputs into cycles.
            return None

        with region.surroundings.restored(self.settings, self.call.device.type), generators(self.rng, self.call.device):
            with named(region.name, "replay"), saved_tensors_hooks(pack, _never), torch.enable_grad():
                try:
                    with gathered(region.layer), mode:
                        output = self.call.again()
                except _Finished:
                    pass
                finally:
                    self.unwritten.restore()
        if isinstance(mode, Replay) and mode.failed:
            raise Mismatch  # the layer caught it
        if count < last:
            raise NondeterministicLayer(
                f"{region.name}: the forward saved {last + 1} tensors or more, its replay {count + 1}. "
                "The layer does not do the same when run again."
            )
        is_first = stage is None or self._stages_left == len(program.stages)
        region.count_replay(stage, mode if isinstance(mode, Replay) else None, program, is_first)
        return output

    def _shield(self, stage: Stage | None):
        """Return what a replay without actions runs under."""
        if stage is None and (self.program is None or self.program.writes_outside):
            return WriteNothingOutside(self.unwritten)
        return nullcontext()

    def _check_unchanged(self, stage: Stage | None) -> None:
        """Raise RuntimeError if what a replay reads was modified in place since the forward: arguments and state."""
        self.call.check_versions(self.region.name)
        reads = None if self.program is None else (stage or self.program).outside_reads
        for tensor, version, storage in self._state:
            if (reads is None or storage in reads) and tensor._version != version:
                raise RuntimeError(
                    f"{self.region.name}: a parameter or buffer of shape {tuple(tensor.shape)} was modified in place "
                    "between the layer's forward and its backward, so the layer cannot be replayed"
                )

    def output_again(self):
        """Run the layer again for its output alone, collecting nothing."""
        self.call.prepare()
        self._check_unchanged(None)
        with (
            self.region.surroundings.restored(self.settings, self.call.device.type),
            generators(self.rng, self.call.device),
            named(self.region.name, "replay"),
            saved_tensors_hooks(lambda tensor: None, _never),
            torch.enable_grad(),
            gathered(self.region.layer),
            self._shield(None),
        ):
            try:
                output = self.call.again()
            finally:
                self.unwritten.restore()
        self.region.count_replay(None, None, self.program)
        return output

    def output_and_saved_again(self):
        """Run the layer again for its output, and collect all dropped tensors on the way."""
        self.call.prepare()
        return self.replay(None, to_the_end=True)

    def _differs(self, n: int, tensor: torch.Tensor) -> str:
        shape, dtype = self._shapes[n]
        return (
            f"{self.region.name}: saved tensor {n} is {tuple(shape)} {dtype} in the forward and {tuple(tensor.shape)} "
            f"{tensor.dtype} in its replay. The layer does not do the same when run again."
        )


def _never(packed):
    raise AssertionError("the graph of a replay must not be run")
