"""`profile=true`: one training step under torch's profiler, with layers and replays named, for the usual viewers.

Owns what is recorded of the step and which files it leaves in the run's folder: trace.json.gz, for
https://ui.perfetto.dev or chrome://tracing, and on CUDA memory_snapshot.pickle, for https://pytorch.org/memory_viz.
Layers get ranges from hooks that stand for this one step alone; the engine names its replays whenever a profiler runs.

    with profiled_step(model, run.path, device):     # one step
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from ckpt.layers import find_layers

TRACE = "trace.json.gz"
SNAPSHOT = "memory_snapshot.pickle"
# Allocations and frees kept of the step. A layer makes hundreds; the oldest are dropped beyond this.
MAX_MEMORY_EVENTS = 1_000_000


@contextlib.contextmanager
def profiled_step(model: nn.Module, folder: Path, device: torch.device) -> Iterator[None]:
    """Profile the step run inside, and write its files into `folder` when it is over. A step that fails leaves none."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
    try:
        with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            with named_layers(model), record_function("training step"):
                yield
                if on_cuda:
                    torch.cuda.synchronize(device)
        profiler.export_chrome_trace(str(folder / TRACE))
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
    finally:
        if on_cuda:
            torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def named_layers(model: nn.Module) -> Iterator[None]:
    """Put a range around each forward of each decoder layer: "layer 3 (model.layers.3, LlamaDecoderLayer) forward".

    A replay calls the layer's forward without its hooks, so these ranges are the first run's; the engine names replays.
    A compiled layer is named around its compiled call: a hook would have it compiled again, in the profiled step. Its
    replays are inside the compiled backward, where no range can be.
    """
    with contextlib.ExitStack() as stack:
        for layer in find_layers(model):
            open_ranges: list[record_function] = []  # a layer may run inside itself
            name = f"layer {layer.index} ({layer.name}, {layer.kind}) forward"
            if (compiled := layer.module.__dict__.get("_compiled_call_impl")) is not None:

                def call(*args, name=name, compiled=compiled, **kwargs):
                    with record_function(name):
                        return compiled(*args, **kwargs)

                layer.module._compiled_call_impl = call
                stack.callback(setattr, layer.module, "_compiled_call_impl", compiled)
                continue

            def enter(module, args, name=name, open_=open_ranges):
                open_.append(record_function(name))
                open_[-1].__enter__()

            def leave(module, args, output, open_=open_ranges):
                if open_:
                    open_.pop().__exit__(None, None, None)

            stack.callback(layer.module.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(layer.module.register_forward_hook(leave, always_call=True).remove)
        yield
