"""A model on fake tensors that takes the very path a real step takes.

Owns the fake mode, the fake copy of a model, and what must be answered or corrected for fake tensors to behave as real
ones. Knows no strategy and counts nothing. Fake tensors stand for the CPU's: on a build without CUDA, fake CUDA tensors
abort the process, and on "meta" attention takes the math path, with T x T scores.

    mode = FakeMode()
    model = fake_copy(model, mode)                  # module, or config; parameters become fake, the original is left
    alone with mode, real_path(mode, one_document=True):
        model(**batch).loss.backward()

What depends on versions (torch 2.11 to 2.13, transformers 5.23 and 5.24) and can go when they do it themselves:
- transformers takes fake tensors for tracing and then builds T x T masks (`masking_utils.is_tracing`);
- `aten._grouped_mm` has no fake kernel but for bf16, though the CPU kernel takes fp32;
- the dispatch cache of fake tensors resizes an empty storage that gets one more view to what the shape says.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import PreTrainedConfig, masking_utils

from ckpt.fake_answers import hook_answers
from ckpt.fake_memo import Memo, is_hollow

aten = torch.ops.aten


class Answers(Protocol):
    """What is known of values: of an op's result (None: run it), of a tensor that Python reads (None: not known)."""

    def op(self, func: Any, args: tuple) -> torch.Tensor | None: ...

    def value(self, tensor: torch.Tensor) -> bool | int | float | None: ...


class Always:
    """Whatever is read has one value."""

    def __init__(self, known: bool | int | float):
        self._known = known

    def op(self, func: Any, args: tuple) -> None:
        """No op is answered."""

    def value(self, tensor: torch.Tensor) -> bool | int | float:
        """The one value."""
        return self._known


class Unpredictable(ValueError):
    """A model or workload whose memory cannot be known from shapes alone; the message names what stands in the way."""


_ASKED = frozenset({aten._local_scalar_dense.default, aten.nonzero.default, aten.max.default})
_REFUSALS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    UnsupportedFakeTensorException,
)


class FakeMode(FakeTensorMode):
    """Fake tensors, with answers where a value would decide something."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside a simulation; the guard against it would cost a tenth of the time."""
        return False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._answers: list[Answers] = []
        self._memo = Memo(self)

    @contextmanager
    def answering(self, answers: Answers) -> Iterator[None]:
        """Answer inside the block."""
        self.push(answers)
        try:
            yield
        finally:
            self.pop(answers)

    def push(self, answers: Answers) -> None:
        """Answer from now on, until `pop`; the latest is asked first."""
        self._answers.append(answers)

    def pop(self, answers: Answers) -> None:
        """End what `push` began."""
        self._answers.remove(answers)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            _refuse_real_parameters(args)
            with self:
                return _grouped_mm(*args, **kwargs)
        if self._answers and func in _ASKED and (answer := self._answer(func, types, args, kwargs)) is not None:
            return answer
        if not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view and isinstance(args[0], FakeTensor) and is_hollow(args[0]):
            self.cache_enabled = False
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self.cache_enabled = True
        key = self._memo.key(func, args, kwargs)
        if key is None:
            _refuse_real_parameters(args)
        if self._memo.knows(key):
            return self._memo.make(key, args)
        return self._memo.watch(key, args, lambda: super(FakeMode, self).__torch_dispatch__(func, types, args, kwargs))

    def _answer(self, func, types, args, kwargs) -> Any:
        if func is not aten._local_scalar_dense.default:
            with self:
                found = (answers.op(func, args) for answers in reversed(self._answers))
                return next((result for result in found if result is not None), None)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            values = (answers.value(args[0]) for answers in reversed(self._answers))
            value = next((value for value in values if value is not None), None)
            if value is None:
                raise
            return value


def _refuse_real_parameters(args: tuple) -> None:
    """A copy that reaches the original's weights would be counted wrong, and give them fake gradients."""
    for value in args:
        if type(value) is nn.Parameter:  # neither fake nor sharded
            raise Unpredictable(
                f"a function put on a module of this model keeps a parameter of shape {tuple(value.shape)} that is not "
                "a copy's own: bind it (types.MethodType(function, module)) and use its `self`, or predict before that."
            )


def _grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    """Return a result of the shape and strides that the kernel gives, whatever the dtype."""
    if a.dim() == 2:
        shape = (offs.shape[0], a.shape[0], b.shape[1]) if b.dim() == 2 else (a.shape[0], b.shape[-1])
    else:
        shape = (a.shape[1], b.shape[1]) if b.dim() == 2 else (a.shape[0], a.shape[1], b.shape[-1])
    dtype = out_dtype or a.dtype
    aligned = 16 // dtype.itemsize  # rows start at multiples of 16 bytes (GroupedMMUtils.h)
    padded = -(-shape[-1] // aligned) * aligned
    strides = (padded, 1) if len(shape) == 2 else (shape[1] * padded, padded, 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


def fake_copy(model: nn.Module | PreTrainedConfig, mode: FakeMode) -> nn.Module:
    """Return a copy of a module (on any device, meta included) or a model of a config, with fake CPU tensors, training.

    Tied parameters stay tied, hooks and patches of instances are copied as `copy.deepcopy` does; the original is not
    touched. Gradients are not copied.

    Raises ValueError for a config that is no causal LM's or cannot be built, and Unpredictable (a ValueError) for
    parameters that are no plain tensors (quantised, sharded).
    """
    if isinstance(model, PreTrainedConfig):
        model = on_meta(model)
    if not isinstance(model, nn.Module):
        raise ValueError(f"predict needs a model, a Transformers config or a model on meta, got {type(model).__name__}")
    memo: dict[int, Any] = {}
    with mode:
        for name, tensor in _tensors_of(model):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(name, tensor)
        copied = copy.deepcopy(model, memo)
    hook_answers(copied, mode)
    return copied.train()


def on_meta(config: PreTrainedConfig) -> nn.Module:
    """Build a config's causal LM without memory. Raises ValueError, naming the config, if it cannot be built."""
    from transformers import AutoModelForCausalLM

    kind = type(config).__name__
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception as error:
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(f"{kind} is no config of a causal language model of the installed Transformers") from error
        line = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{kind} cannot be built: {type(error).__name__}: {line}") from error


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}", value


def _fake(name: str, tensor: torch.Tensor) -> torch.Tensor:
    plain = type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor) or (
        isinstance(tensor, nn.Parameter) and type(tensor.data) in (torch.Tensor, FakeTensor)
    )
    if not plain or tensor.layout is not torch.strided or hasattr(tensor, "quant_state"):
        raise Unpredictable(
            f"{name} is a {type(tensor).__name__}, whose memory cannot be predicted. Give the model with plain "
            "tensors: before it is quantised or sharded, or its config."
        )
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def real_path(mode: FakeMode, one_document: bool, padded: bool = False) -> Iterator[None]:
    """Make the model decide about masks as it does on real tensors.

    one_document: rows hold one document each, so that positions never restart (`find_packed_sequence_indices`).
    padded: masks that are given leave tokens out.
    """
    tracing, find, whole = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices, masking_utils.fast_all

    def find_packed(position_ids):
        with mode.answering(Always(one_document)):
            return find(position_ids)

    class Known:
        """Stands for the truth of `tensor.sum() == tensor.numel()`."""

        def __init__(self, tensor):
            self._tensor = tensor

        def __bool__(self):
            with mode.answering(Always(not padded)):
                return bool(self._tensor)

    masking_utils.is_tracing = lambda tensor=None: tracing()
    masking_utils.find_packed_sequence_indices = find_packed
    masking_utils.fast_all = lambda tensor: Known(whole(tensor))
    try:
        yield
    finally:
        masking_utils.is_tracing = tracing
        masking_utils.find_packed_sequence_indices = find
        masking_utils.fast_all = whole


@contextmanager
def naming_refusals() -> Iterator[None]:
    """Turn what fake tensors cannot do into an Unpredictable that names the op and the line of the model that asked for
    it."""
    try:
        yield
    except _REFUSALS as error:
        op = getattr(error, "func", None) or (error.args[0] if error.args else error)
        if isinstance(error, (UnsupportedOperatorException, UnsupportedFakeTensorException)):
            what = f"op {op} cannot run on fake tensors"
        else:
            what = f"op {op} lets the values of a tensor decide what happens next, and a prediction has none"
        raise Unpredictable(
            f"this model's forward cannot be predicted: {what} ({_place(error)}). Measure a real step instead "
            "(ckpt.measure), or give a module without that op."
        ) from error
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise Unpredictable(
            f"a tensor of this step takes 2^63 bytes or more ({_place(error)}): lower seq_len or batch_size"
        ) from error


def _place(error: BaseException) -> str:
    """The innermost line that belongs neither to torch nor to this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and not frame.filename.startswith("<") and "/ckpt/" not in frame.filename
    ]
    if not frames:
        return "outside of the model"
    last = frames[-1]
    return f"{'/'.join(last.filename.rsplit('/', 2)[-2:])}, line {last.lineno}: {last.line}"
