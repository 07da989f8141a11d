"""The benchmark under torch.compile (inductor, each decoder layer), beside eager mode: step time, peak, gradients.

No dispatch mode sees what compiled code allocates, so peaks here are what the CPU allocator handed out during a step
(the profiler's events), on top of parameters and batch; eager rows are measured in the same way. FLOPs are not counted.
A row whose strategy is not obeyed by compiled code shows it by the peak of compiled `none`, and is marked.

    compile_points(case, store, num_rounds=5)        # fills store.compiled
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._inductor.compile_fx
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler

from ckpt.layers import find_layers
from scripts.bench_cases import Case
from scripts.bench_measure import compared
from scripts.bench_rows import Row, rows
from scripts.bench_store import Store, first_line

BUDGETS = (0.2, 0.5, 0.8)


@dataclass(frozen=True)
class Variant:
    """A row, compiled or not. budget: the partitioner's activation_memory_budget, 1 for its default."""

    name: str
    what: str
    row: Row
    is_compiled: bool = True
    budget: float = 1.0
    has_policy: bool = False  # replays something, so that its peak must be below that of compiled `none`


def variants() -> list[Variant]:
    """List what is compared; the eager rows first."""
    row = rows("same")
    made = [
        Variant(f"eager {name}", f"eager, {row[name].what}", row[name], is_compiled=False)
        for name in ("none", "full", "selective")
    ]
    made.append(Variant("none", "compiled, everything kept", row["none"]))
    made += [
        Variant(name, f"compiled, {row[name].what}", row[name], has_policy=True)
        for name in ("full", "selective", "library 1", "trl")
    ]
    made += [Variant(f"budget {b}", f"compiled, activation_memory_budget={b}", row["none"], budget=b) for b in BUDGETS]
    return made


def compiler_problem() -> str:
    """Return why inductor finds no C++ compiler here, empty if it finds one."""
    try:
        get_cpp_compiler()
    except Exception as error:  # the compiler raises what it likes
        return first_line(error)
    return ""


def compile_points(case: Case, store: Store, num_rounds: int) -> None:
    """Measure peaks and gradients of all variants, then time them in rounds; done at once if the store has it all."""
    known = store.compiled
    if len(known.get("rounds", ())) >= num_rounds and set(known["cells"]) == {v.name for v in variants()}:
        return
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=256), torch._inductor.config.patch(compile_threads=1):
        ready, cells = {}, {}
        for variant in variants():
            try:
                ready[variant.name] = _ready(case, variant)
            except Exception as error:  # the compiler raises what it likes
                if not variant.has_policy:
                    raise
                cells[variant.name] = {"what": variant.what, "refused": first_line(error)}
        _, expected, gradients = ready["eager none"][1]
        for variant in (v for v in variants() if v.name in ready):
            _, (peak, loss, mine) = ready[variant.name]
            cell = {"what": variant.what, "peak_bytes": peak, **compared(loss, mine, expected, gradients)}
            if variant.has_policy and peak > 0.98 * cells["none"]["peak_bytes"]:
                cell["refused"] = "not obeyed by compiled code: its peak is that of everything kept"
            cells[variant.name] = cell
            print(f"{case.name:>10} compile: {variant.name:<24} {peak / 2**20:9.1f} MiB", flush=True)
        store.compiled = {"cells": cells, "rounds": []}
        names = [name for name in ready if "refused" not in cells[name]]
        for round_ in range(num_rounds):
            seconds = {}
            for name in _turned(names, round_):
                start = time.thread_time()
                ready[name][0]()
                seconds[name] = time.thread_time() - start
            store.compiled["rounds"].append(seconds)
            store.save()
    torch._dynamo.reset()


def _turned(names: list[str], round_: int) -> list[str]:
    turned = names[round_ % len(names) :] + names[: round_ % len(names)]
    return turned if round_ % 2 else turned[::-1]


def _ready(case: Case, variant: Variant) -> tuple[Callable[[], None], tuple[int, torch.Tensor, list]]:
    """Prepare and compile a variant; return its step, and (peak bytes, loss, gradients) of one."""
    model, batch = case.model(), case.batch()

    # A backend of its own keeps this variant's code apart from others', which have the same forward.
    def backend(graph, inputs):
        return torch._inductor.compile_fx.compile_fx(graph, inputs)

    is_lowered = variant.is_compiled and variant.row.side == "ours"
    one = variant.row.prepare(model, compile={"backend": backend} if is_lowered else False)
    if variant.is_compiled and not is_lowered:
        for layer in find_layers(model):
            layer.module.compile(backend=backend)

    def step() -> None:
        one(*batch)
        model.zero_grad(set_to_none=True)

    with torch._functorch.config.patch(activation_memory_budget=variant.budget):
        step()
        step()
        result: list[torch.Tensor] = []
        held = sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in [*_state(model), *batch]}.values())
        grown = allocated(lambda: result.append(one(*batch)))
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return step, (held + grown, result[0], gradients)


def _state(model: nn.Module) -> itertools.chain:
    return itertools.chain(model.parameters(), model.buffers())


def allocated(step: Callable[[], object]) -> int:
    """Return the most bytes by which the CPU allocator's total grew during a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes: list[tuple[int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    if not changes:
        raise RuntimeError("the profiler saw no allocation: this build of torch does not report the CPU allocator's")
    return max(itertools.accumulate(size for _, size in sorted(changes, key=lambda change: change[0])))
