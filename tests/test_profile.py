"""profile=true: a trace of one step, with layers and replays named, that changes nothing else."""

import gzip
import json

import pytest
import torch
from test_loop_recipes import losses, run_program, text  # noqa: F401
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.engine.ranges import named
from recipes import profile


def events(folder):
    with gzip.open(folder / profile.TRACE) as file:
        return json.load(file)["traceEvents"]


def counts(folder, what):
    """How often each range whose name ends so stands in a trace."""
    found = {}
    for event in events(folder):
        if event.get("ph") == "X" and event.get("name", "").endswith(what):
            found[event["name"]] = found.get(event["name"], 0) + 1
    return found


@pytest.mark.parametrize("strategy", [{"name": "full"}, {"name": "segments", "size": 3, "inner": "replay"}])
def test_trace_names_every_layer_and_every_replay(tmp_path, text, strategy):  # noqa: F811
    run, _ = run_program(tmp_path, text, strategy=strategy, profile=True, grad_accum=2)
    forwards = counts(run.path, " forward")
    assert forwards == {f"layer {i} (model.layers.{i}, LlamaDecoderLayer) forward": 2 for i in range(3)}
    replays = counts(run.path, " replay")
    assert set(replays) == {name.replace("forward", "replay") for name in forwards}
    assert all(count >= 2 for count in replays.values())


def test_what_is_kept_shows_no_replay(tmp_path, text):  # noqa: F811
    run, _ = run_program(tmp_path, text, profile=True)
    assert len(counts(run.path, " forward")) == 3 and not counts(run.path, " replay")


def test_profiling_changes_no_logged_value_and_only_one_file(tmp_path, text):  # noqa: F811
    plain, expected = run_program(tmp_path, text, name="plain", strategy={"name": "selective"})
    run, lines = run_program(tmp_path, text, name="profiled", strategy={"name": "selective"}, profile=True)
    assert losses(lines) == losses(expected)
    assert {p.name for p in run.path.iterdir()} - {p.name for p in plain.path.iterdir()} == {profile.TRACE}
    assert run.summary["peak_bytes"] == plain.summary["peak_bytes"]


def test_a_run_of_one_step_profiles_the_probe_step(tmp_path, text):  # noqa: F811
    run, lines = run_program(tmp_path, text, strategy={"name": "full"}, profile=True, steps=1, optim={"warmup": 0})
    assert len(lines) == 1 and len(counts(run.path, " forward")) == 3
    assert run.summary["peak_bytes"] > 0


def test_ranges_are_no_ranges_while_nobody_profiles():
    assert named("layer 0", "replay") is named("layer 1", "replay")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert named("layer 0", "replay") is not named("layer 0", "replay")


def test_profiled_step_has_the_gradients_of_an_unprofiled_one_and_leaves_no_hook(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config).train()
    ckpt.apply(model, "selective")
    ids = torch.randint(0, 64, (1, 16))

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    gradients()
    expected = gradients()
    with profile.profiled_step(model, tmp_path, torch.device("cpu")):
        found = gradients()
    assert all(map(torch.equal, found, expected))
    hooks = [m for m in model.model.layers if m._forward_hooks or m._forward_pre_hooks]
    assert not hooks


def test_a_step_that_fails_leaves_no_trace_and_no_hook(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config).train()
    with pytest.raises(IndexError):
        with profile.profiled_step(model, tmp_path, torch.device("cpu")):
            model(input_ids=torch.full((1, 4), 64), use_cache=False)
    assert not list(tmp_path.iterdir()) and not torch.autograd._profiler_enabled()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.layers)


def test_a_compiled_layer_is_named_and_not_compiled_again(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    model, graphs = LlamaForCausalLM(config).train(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ckpt.apply(model, "none", compile={"backend": backend})
    ids = torch.randint(0, 64, (1, 16))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    calls, known = [layer._compiled_call_impl for layer in model.model.layers], len(graphs)
    with profile.profiled_step(model, tmp_path, torch.device("cpu")):
        step()
    names = [f"layer {i} (model.layers.{i}, LlamaDecoderLayer) forward" for i in (0, 1)]
    assert counts(tmp_path, " forward") == dict.fromkeys(names, 1)
    assert [layer._compiled_call_impl for layer in model.model.layers] == calls
    step()
    assert len(graphs) == known > 0
