"""Find the token-wise parts of a model by running it on a few tokens.

Seen while it runs: which child modules of a layer take one tensor and return one, whose output is whose input, and
which ops read what lies in between; and which norms stand alone, in the layers and behind them. Checked by number too:
a chain of tokens must give what it gives token by token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ckpt.engine.chain_checks import why_hooked, why_random
from ckpt.engine.chain_probe import alone, has_values
from ckpt.engine.record import Recorder
from ckpt.engine.tiles import Chain

_PROBE_TOKENS = 4


@dataclass
class _Seen:
    """One call of a child module."""

    name: str
    module: nn.Module
    source: torch.Tensor
    result: torch.Tensor
    calls: int = 1


@dataclass
class _LayerProbe:
    seen: dict[str, _Seen] = field(default_factory=dict)
    recorder: Recorder | None = None
    readers: dict[int, set[str]] = field(default_factory=dict)  # storage address -> paths of the modules that read it
    odd: set[str] = field(default_factory=set)  # children called twice, or with other arguments than one tensor


@dataclass(frozen=True)
class Found:
    """What of a model is token-wise. chains: by layer, the part that holds the MLP, or None; reasons: why there is
    none. norms: those that stand alone, of a layer or behind the last one."""

    chains: list[Chain | None]
    reasons: list[str | None]
    norms: list[Chain]


def find_chains(model: nn.Module, layers: list[nn.Module]) -> Found:
    """Find the token-wise parts of a model, given its decoder layers.

    The model is run once, without gradients, on a few tokens; generators and training flags are left as they were.
    """
    probes = [_LayerProbe() for _ in layers]
    outside = _LayerProbe()
    chains, reasons, norms = [], [], []
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[] if device.type in ("cpu", "meta") else [device]):
        failure = _run_probe(model, layers, probes, outside)
        for probe in probes:
            chain, reason = (None, failure) if not probe.seen else _chain_of(probe)
            if chain is not None and not _is_token_wise(chain, probe):
                chain, reason = None, "its MLP mixes tokens, or has dropout that no module of its own draws"
            if chain is not None and (hooked := why_hooked(chain.modules)):
                chain, reason = None, hooked
            chains.append(chain)
            reasons.append(reason)
            norms += _norms_of(probe, () if chain is None else chain.names)
            probe.seen.clear()
        norms += _norms_of(outside, ())
    taken: set[int] = {id(m) for chain in chains if chain is not None for m in chain.modules}
    alone = []
    for norm in norms:  # a module that several layers share stands once
        if id(norm.modules[0]) not in taken:
            taken.add(id(norm.modules[0]))
            alone.append(norm)
    return Found(chains, reasons, alone)


def _norms_of(probe: _LayerProbe, taken: tuple[str, ...]) -> list[Chain]:
    """Return the norms that are called with the hidden states alone, each as a chain."""
    found = []
    for seen in probe.seen.values():
        if seen.name in taken or num_linear(seen.module) or not is_token_wise(seen.module):
            continue
        # Norms of single heads have their tokens in another dimension.
        if not any(True for _ in seen.module.parameters()) or seen.source.dim() != 3:
            continue
        if why_random(seen.module) is not None or seen.source.shape != seen.result.shape:
            continue
        chain = Chain([seen.module], (seen.name,))
        if _is_token_wise(chain, probe):
            found.append(chain)
    return found


def _run_probe(model, layers, probes, outside) -> str | None:
    hooks = []
    inside = {id(module) for layer in layers for module in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and not any(True for _ in module.children()):
            hooks.append(module.register_forward_hook(_Note(name, outside), with_kwargs=True))
    outside.recorder = _ALWAYS
    for layer, probe in zip(layers, probes, strict=True):
        hooks.append(layer.register_forward_pre_hook(_Enter(layer, probe)))
        hooks.append(layer.register_forward_hook(_Leave(probe), always_call=True))
        for name, child in layer.named_children():
            hooks.append(child.register_forward_hook(_Note(name, probe), with_kwargs=True))
    try:
        with torch.no_grad(), alone(model) as device:
            model(input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.long, device=device), use_cache=False)
    except Exception as error:  # any model code may run here; a model that cannot be probed is trained untiled
        return f"a probe of {_PROBE_TOKENS} tokens failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    finally:
        for hook in hooks:
            hook.remove()
        for probe in probes:
            if probe.recorder is not None:
                probe.recorder.__exit__(None, None, None)
                probe.recorder = None
    return "it was not called"


_ALWAYS = object()  # modules outside of layers are noted whenever they are called


class _Enter:
    def __init__(self, layer, probe):
        self._layer, self._probe = layer, probe

    def __call__(self, module, args):
        if self._probe.recorder is None and not self._probe.seen:
            self._probe.recorder = Recorder(self._layer, [])
            self._probe.recorder.__enter__()


class _Leave:
    def __init__(self, probe):
        self._probe = probe

    def __call__(self, module, args, output):
        recorder, self._probe.recorder = self._probe.recorder, None
        if recorder is None:
            return
        recorder.__exit__(None, None, None)
        addresses = {number: address for address, number in recorder._storages.items()}
        for op in recorder.record.ops:
            if not op.is_view:
                for number in op.reads:
                    self._probe.readers.setdefault(addresses[number], set()).add(op.key.path.split(".")[0])


class _Note:
    def __init__(self, name, probe):
        self._name, self._probe = name, probe

    def __call__(self, module, args, kwargs, output):
        probe, name = self._probe, self._name
        if probe.recorder is None:
            return
        tensors = [*args, *kwargs.values()]
        plain = len(tensors) == 1 and len(args) == 1 and isinstance(tensors[0], torch.Tensor)
        if name in probe.seen or not plain or not isinstance(output, torch.Tensor):
            probe.odd.add(name)
            probe.seen.pop(name, None)
        elif name not in probe.odd:
            probe.seen[name] = _Seen(name, module, tensors[0], output)


def _chain_of(probe: _LayerProbe) -> tuple[Chain | None, str | None]:
    """Return the longest way through token-wise children that holds an MLP: two linear layers or more."""
    usable, reasons = {}, []
    for seen in probe.seen.values():
        if is_token_wise(seen.module):
            reason = why_random(seen.module)
            if reason is None:
                usable[seen.name] = seen
            elif num_linear(seen.module):
                reasons.append(reason)
    following = {}
    for seen in usable.values():
        readers = probe.readers.get(_address(seen.result), set())
        nexts = [s for s in usable.values() if s.source is seen.result and readers <= {s.name}]
        if len(nexts) == 1:
            following[seen.name] = nexts[0].name
    best: list[_Seen] = []
    for start in usable.keys() - set(following.values()):
        names = [start]
        while names[-1] in following:
            names.append(following[names[-1]])
        links = [usable[name] for name in names]
        if sum(num_linear(s.module) for s in links) >= 2 and _size(links) > _size(best):
            best = links
    if not best:
        return None, reasons[
            0
        ] if reasons else "it has no dense MLP (a mixture of experts, or work between its modules)"
    return Chain([s.module for s in best], tuple(s.name for s in best)), None


def _size(links: list[_Seen]) -> int:
    return sum(p.numel() for s in links for p in s.module.parameters())


def _is_token_wise(chain: Chain, probe: _LayerProbe) -> bool:
    source = probe.seen[chain.names[0]].source
    weights = [p for module in chain.modules for p in module.parameters()]
    if source.dim() < 2 or source.shape[-2] < 2 or not all(map(has_values, weights or [source])):
        return source.dim() >= 2  # fake or meta tensors have no values to compare
    with torch.no_grad():
        # Not the probe's own rows, which are equal: position 0 must not see position 1, nor the other way round.
        sample = torch.randn(source.shape, device=weights[0].device if weights else source.device).to(source.dtype)
        if has_values(source):
            sample = sample + source
        whole = chain.run(sample)
        parts = torch.cat([chain.run(sample[..., i : i + 1, :]) for i in range(sample.shape[-2])], dim=-2)
    tolerance = 1e-4 if source.dtype == torch.float32 else 5e-2
    return whole.shape == parts.shape and torch.allclose(whole, parts, rtol=tolerance, atol=tolerance)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_token_wise(module: nn.Module) -> bool:
    """True for a module made of linear layers, norms, activations and dropouts alone. What its code does with them is
    for the probe to check."""
    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    if any(any(True for _ in m.parameters(recurse=False)) for m in module.modules() if m not in leaves):
        return False
    weighted = [m for m in leaves if any(True for _ in m.parameters(recurse=False))]
    return all(_is_known(m) for m in weighted)


def num_linear(module: nn.Module) -> int:
    """Return how many linear layers the module has."""
    return sum(_is_linear(m) for m in module.modules() if not any(True for _ in m.children()))


def _is_linear(module: nn.Module) -> bool:
    return "Linear" in type(module).__name__ or type(module).__name__ == "Conv1D"


def _is_known(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return _is_linear(module) or "norm" in name or name == "xieluactivation"  # apertus: learned slopes
