"""Policies under torch.compile: gradients as in eager, one graph a kind of layer, and what is kept is not run again.

Gradients stay right whatever the compiler makes of a policy: only the nodes of its graphs tell whether it was obeyed.
"""

from __future__ import annotations

import functools
from collections import Counter

import exactness
import pytest
import snapshots
import torch
import zoo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition

import ckpt
from ckpt.engine.keys import ATTENTION, canonical_op
from ckpt.plan import LayerPlan

FAMILIES = {
    # family: dropout. Without it attention is the fused kernel; with it, or with a soft cap, two batched matmuls.
    "llama": 0.0,
    "gpt2": 0.1,
    "gemma2": 0.1,
    "qwen3": 0.0,
    "mixtral": 0.1,
    "gpt_neox": 0.1,
    "deepseek_v3": 0.0,
    "olmo2": 0.0,
}
DEFAULT = ("llama", "gpt2")  # the rest takes 5 CPU seconds each
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "transformers.grouped_mm_fallback", ATTENTION)
STRATEGIES = {
    "none": ckpt.KeepAll(),
    "full": ckpt.Full(),
    "attention": ckpt.Selective("attention"),
    "attention+matmul+moe": ckpt.Selective("attention+matmul+moe"),
}


class Counting:
    """A backend that runs what aot_autograd makes as it is, and counts nodes: `forward` and `backward`, by op."""

    def __init__(self):
        self.num_graphs = 0
        self.forward: list[Counter] = []
        self.backward: list[Counter] = []

    def __call__(self, module, inputs):
        self.num_graphs += 1
        return aot_autograd(
            fw_compiler=functools.partial(self._count, self.forward),
            bw_compiler=functools.partial(self._count, self.backward),
            partition_fn=default_partition,
        )(module, inputs)

    @staticmethod
    def _count(into: list[Counter], module, inputs):
        found: Counter = Counter()
        for node in module.graph.nodes:
            # a random op that is run again sits inside a higher-order op that carries its generator's state
            for target in (node.target, *node.args[:1], *node.args[1:2]):
                if node.op == "call_function" and isinstance(target, torch._ops.OpOverload):
                    found[canonical_op(target)] += 1
        into.append(found)
        return make_boxed_func(module.forward)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@functools.lru_cache(maxsize=1)
def plain(family: str) -> tuple[torch.nn.Module, exactness.Baseline]:
    """Return a model and its plain steps. It was compiled once before: dynamo leaves marks of its own on parameters."""
    model = zoo.build(family, dropout=FAMILIES[family], layers=4)
    batches = [zoo.batch(model, 16)]
    handle = ckpt.apply(model, "none", compile={"backend": "aot_eager"})
    exactness.run_step(model, batches[0])
    handle.undo()
    return model, exactness.baseline(model, batches)


def compiled(family: str, strategy) -> tuple[exactness.Comparison, Counting]:
    model, base = plain(family)
    torch._dynamo.reset()
    backend = Counting()

    def attach(model):
        return ckpt.apply(model, strategy, compile={"backend": backend, "fullgraph": True})

    return exactness.compare(model, base, attach), backend


def counts(backend: Counting) -> Counter:
    """Return the matmul and attention nodes of all backward graphs."""
    total = sum(backend.backward, Counter())
    return Counter({name: total[name] for name in MATMULS if total[name]})


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in DEFAULT else pytest.mark.slow) for f in FAMILIES])
def test_compiled_strategies_agree_with_eager_and_run_again_only_what_is_not_kept(family):
    backends = {}
    for name, strategy in STRATEGIES.items():
        found, backends[name] = compiled(family, strategy)
        found.raise_if_wrong(name)
    none, full, attention, matmul = (counts(backends[name]) for name in STRATEGIES)
    assert {b.num_graphs for b in backends.values()} == {backends["none"].num_graphs}
    assert matmul == none, "kept matmuls and attention are run again"
    assert full > none
    kept = full - attention
    assert kept and not attention - full
    assert set(kept) <= {ATTENTION, "bmm"}, "only attention was to be kept"
    assert all(attention[name] == none[name] for name in kept)


def small(family="llama", layers=2):
    model = zoo.build(family, layers=layers)
    return model, zoo.batch(model, 16)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (ckpt.Offload(), {}, "strategy offload: it offloads"),
        (ckpt.Segments(size=2), {}, "strategy segments: it replays several layers as one"),
        (ckpt.Plan([LayerPlan(), LayerPlan()]), {}, "strategy plan: it decides op by op for each layer"),
        (ckpt.Auto(budget_gib=1), {}, "strategy auto: plans cannot be lowered"),
        (ckpt.Full(), {"tile_mlp": 2}, "tile_mlp=2"),
        (ckpt.Full(), {"dynamic": "model.layers.0"}, "dynamic="),
        (ckpt.Full(), {"compile": "inductor"}, "compile='inductor' must be True, False, or a mapping"),
    ],
)
def test_what_cannot_be_lowered_is_refused_by_name(strategy, options, message):
    model, _ = small()
    before = snapshots.take(model)
    with pytest.raises(ValueError, match=message):
        ckpt.apply(model, strategy, **{"compile": True, **options})
    assert not snapshots.differences(before, snapshots.take(model), frozenset())


def test_layers_of_a_plain_class_are_refused_by_name():
    model, _ = small("openai-gpt")
    with pytest.raises(ValueError, match="is no GradientCheckpointingLayer of Transformers"):
        ckpt.apply(model, "full", compile=True)


def test_keep_list_without_a_match_is_an_error_and_leaves_the_model_as_it_was():
    model, inputs = small()
    ckpt.apply(model, ckpt.Selective("nonsense"), compile={"backend": "aot_eager"})
    with pytest.raises(ValueError, match="'nonsense' in keep='nonsense' matched no op"):
        model(**inputs)
    assert ckpt.applied_to(model) is None
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_layer_that_cannot_be_captured_says_so():
    """gemma3n's layers hand keys and values on by writing into a dict, which a compiled checkpoint may not."""
    model, inputs = small("gemma3n_text", layers=4)
    handle = ckpt.apply(model, "full", compile={"backend": "aot_eager"})
    with pytest.raises(RuntimeError, match="could not capture it in one graph"):
        model(**inputs)
    handle.undo()


def test_eval_mode_with_gradients_is_refused_and_without_them_runs():
    model, inputs = small()
    handle = ckpt.apply(model.eval(), "full", compile={"backend": "aot_eager"})
    with pytest.raises(RuntimeError, match="eval mode with gradients on"):
        model(**inputs)
    with torch.no_grad():
        assert model(**inputs).loss.isfinite()
    handle.undo()


def test_every_n_compiles_two_kinds_of_layers_and_audit_and_plan_say_what_was_traced():
    model, inputs = small(layers=4)
    backend = Counting()
    handle = ckpt.apply(model, ckpt.EveryN(2), compile={"backend": backend}, loss="chunked")
    with pytest.raises(ValueError, match="run one, then ask for the plan"):
        handle.plan()
    model(**inputs).loss.backward()
    assert backend.num_graphs == 2
    assert "2 of 4 layers replayed by the compiler, 0 of" in str(handle.audit())
    assert [layer.replay for layer in handle.plan().layers] == [True, False, True, False]
    handle.undo()


def test_other_lengths_stay_right():
    model, _ = small()
    batches = [zoo.batch(model, length, seed=length) for length in (16, 24, 13)]
    plain_steps = [exactness.run_step(model, inputs) for inputs in batches]
    handle = ckpt.apply(model, ckpt.Selective("by_price", min_flops_per_byte=16), compile={"backend": "aot_eager"})
    for inputs, expected in zip(batches, plain_steps, strict=True):
        got = exactness.run_step(model, inputs)
        assert torch.equal(got.loss, expected.loss)
        for name, gradient in expected.gradients.items():
            error = (got.gradients[name] - gradient).norm() / gradient.norm()
            assert error <= 1e-6, name  # sizes that vary make other matmul kernels
    handle.undo()


def test_each_policy_and_each_model_is_compiled_for_itself():
    """Dynamo must not hand one policy's graphs to the next, nor one model's to another, however many there were."""
    (model, inputs), (other, _) = small(layers=1), small(layers=1)
    expected = exactness.run_step(model, inputs)
    backend = Counting()  # one for all, as with "inductor": graphs are kept by backend too
    options = {"backend": backend, "fullgraph": True}
    beside = ckpt.apply(other, "full", compile=options)
    exactness.run_step(other, inputs)
    again = {}
    for turn in range(4):  # one function is compiled 8 times at most
        for name in ("full", "selective", "none"):
            backend.num_graphs = 0
            backend.backward.clear()
            handle = ckpt.apply(model, name, compile=options)
            got = exactness.run_step(model, inputs)
            handle.undo()
            assert backend.num_graphs == 1, (name, turn)
            assert all(torch.equal(got.gradients[n], gradient) for n, gradient in expected.gradients.items()), name
            assert again.setdefault(name, counts(backend)) == counts(backend), (name, turn)
    assert again["full"] > again["selective"] > again["none"]
    exactness.run_step(other, inputs)
    beside.undo()


@pytest.mark.slow
def test_inductor_agrees_with_eager():
    """Fused kernels round otherwise than eager ones; nothing else may differ."""
    model, inputs = small()
    expected = exactness.run_step(model, inputs)
    for strategy in STRATEGIES.values():
        handle = ckpt.apply(model, strategy, compile=True)
        got = exactness.run_step(model, inputs)
        handle.undo()
        assert torch.allclose(got.loss, expected.loss, rtol=1e-6)
        for name, gradient in expected.gradients.items():
            assert (got.gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
