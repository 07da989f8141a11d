"""A plan is a policy as a file: read back it says the same, holds wherever its keys do, and is refused elsewhere."""

from __future__ import annotations

import json
import random
import stat

import exactness
import pytest
import torch
import zoo
from engine_kit import MLP, Keep, Stack, built, example, step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.engine.keys import OpKey
from ckpt.plan import Decision, LayerPlan, Plan

words = st.text(alphabet="abcxyz_09", min_size=1, max_size=6)
keys = st.builds(OpKey, st.lists(words, max_size=3).map(".".join), words, st.integers(0, 30))
layers = st.builds(
    LayerPlan,
    replay=st.booleans(),
    segment=st.none() | st.integers(0, 5),
    inner=st.just("keep"),
    offload_input=st.booleans(),
    decisions=st.dictionaries(keys, st.sampled_from(Decision), max_size=4),
)


# Busy machines are slow, not wrong.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(layers, min_size=1, max_size=6), st.none() | st.just({"target": "host", "directory": None}))
def test_a_plan_is_read_back_as_it_was(rows, offload):
    plan = Plan(rows, name="auto", source={"strategy": "auto", "budget_gib": 1.5}, offload=offload)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan


def plan_of(model, strategy, inputs) -> Plan:
    handle = ckpt.apply(model, strategy)
    model(**inputs).loss.backward()
    plan = handle.plan()
    handle.undo()
    return plan


def test_a_saved_plan_does_what_the_strategy_did(tmp_path):
    model = zoo.build("llama")
    batches = [zoo.batch(model, 16, seed=n) for n in range(2)]
    plain = exactness.baseline(model, batches)
    segments = ckpt.Segments(size=2, inner="replay")
    for strategy in (ckpt.Selective("attention+matmul"), ckpt.EveryN(2), segments, ckpt.Full(), ckpt.Offload()):
        plan_of(model, strategy, batches[0]).save(tmp_path / "plan.json")
        by_strategy = exactness.compare(model, plain, lambda m, s=strategy: ckpt.apply(m, s))
        by_file = exactness.compare(model, plain, lambda m: ckpt.apply(m, ckpt.FromPlan(str(tmp_path / "plan.json"))))
        by_strategy.raise_if_wrong()
        by_file.raise_if_wrong()
        facts = [
            [(a.index, a.replays, a.ops_kept, a.kept_bytes, a.ops_run_again) for a in comparison.audits[-1].layers]
            for comparison in (by_strategy, by_file)
        ]
        assert facts[0] == facts[1]


def test_equal_layers_are_written_once(tmp_path):
    model = zoo.build("llama")
    plan = plan_of(model, ckpt.Selective(), zoo.batch(model, 8))
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert [group["indices"] for group in data["layers"]] == [[0, 1, 2, 3]]
    assert data["layers"][0]["decisions"]["self_attn/attention#0"] == "keep"


def test_a_plan_replaces_an_older_file_whole_and_others_can_read_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("an older plan, and longer than the new one" * 100)
    Plan([LayerPlan()]).save(path)
    assert Plan.load(path).layers == [LayerPlan()]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


# ---- one file, many surroundings -----------------------------------------------------------------------------------


def everywhere(name="llama"):
    """Yield (what, model, inputs, autocast) that one plan must hold for."""
    inputs = zoo.batch(zoo.build(name), 16)
    yield "as planned", zoo.build(name), inputs, False
    yield "another length", zoo.build(name), zoo.batch(zoo.build(name), 23), False
    yield "another batch size", zoo.build(name), zoo.batch(zoo.build(name), 16, batch=1), False
    yield "autocast", zoo.build(name), inputs, True
    yield "bfloat16", zoo.build(name).bfloat16(), inputs, False
    frozen = zoo.build(name)
    frozen.get_input_embeddings().requires_grad_(False)
    yield "frozen embeddings", frozen, inputs, False


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma2"])
def test_one_plan_holds_at_other_lengths_under_autocast_and_in_bfloat16(name, tmp_path):
    model = zoo.build(name)
    plan_of(model, ckpt.Selective("attention+matmul"), zoo.batch(model, 16)).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    wanted = [{k for k, d in layer.decisions.items() if d is Decision.KEEP} for layer in plan.layers]
    assert all(wanted)
    for what, model, inputs, autocast in everywhere(name):
        handle = ckpt.apply(model, plan)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**inputs).loss.backward()
        for region in handle.regions:
            decided = {op.key for op in region.latest.record.ops if plan.decide(region.index, op) is Decision.KEEP}
            assert decided == wanted[region.index], what
        assert all(layer.replays == 1 for layer in handle.audit().layers), what


def test_one_plan_holds_with_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    model = zoo.build("llama")
    inputs = zoo.batch(model, 16)
    plan_of(model, ckpt.Selective("attention+matmul"), inputs).save(tmp_path / "plan.json")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    adapted = peft.get_peft_model(zoo.build("llama"), settings).train()
    plain = exactness.baseline(adapted, [inputs, inputs])
    comparison = exactness.compare(adapted, plain, lambda m: ckpt.apply(m, Plan.load(tmp_path / "plan.json")))
    comparison.raise_if_wrong()
    for layer in comparison.audits[-1].layers:
        assert layer.unmatched == 0 and layer.ops_kept > 0
        assert layer.undecided > 0  # the adapters' own ops: recomputed, and counted


def test_one_plan_holds_with_eager_experts_whose_ops_depend_on_data(tmp_path):
    model = zoo.build("mixtral")
    inputs = zoo.batch(model, 16)
    plan_of(model, ckpt.Selective("attention+matmul+moe"), inputs).save(tmp_path / "plan.json")
    eager = zoo.build("mixtral")
    eager.set_experts_implementation("eager")
    plain = exactness.baseline(eager, [inputs, zoo.batch(model, 16, seed=1)])
    comparison = exactness.compare(eager, plain, lambda m: ckpt.apply(m, Plan.load(tmp_path / "plan.json")))
    comparison.raise_if_wrong()
    for layer in comparison.audits[-1].layers:
        assert layer.dynamic_because == "its op sequence depends on data"
        assert layer.unmatched > 0  # the grouped matmuls of the planned implementation
        assert layer.ops_kept > 0  # attention and its projections are where they were


def test_keys_that_find_no_op_are_an_error_in_a_layer_whose_ops_are_known():
    model = built(lambda: Stack(MLP(), MLP()))
    keep = {OpKey("a", "mm", 0): Decision.KEEP, OpKey("c", "mm", 0): Decision.KEEP}
    ckpt.apply(model, Plan([LayerPlan(decisions=keep), LayerPlan()]))
    with pytest.raises(ValueError, match=r"plan: layer 0 has no op 'c/mm#0'.*ops are e\.g\. .*Make the plan"):
        model(example().requires_grad_())


def test_recompute_decisions_that_find_no_op_are_counted_and_harmless():
    """A layout copy that batch size 1 does without."""
    model = built(lambda: Stack(MLP()))
    decisions = {OpKey("a", "mm", 0): Decision.KEEP, OpKey("", "clone", 0): Decision.RECOMPUTE}
    handle = ckpt.apply(model, Plan([LayerPlan(decisions=decisions)]))
    step(model, example())
    assert handle.audit().layers[0].unmatched == 1
    assert "1 keys of the plan found no op" in str(handle.audit())


def test_keys_that_find_no_op_are_no_error_in_a_layer_declared_dynamic():
    model = built(lambda: Stack(MLP()))
    plan = Plan([LayerPlan(decisions={OpKey("c", "mm", 0): Decision.KEEP})])
    handle = ckpt.apply(model, plan, dynamic=("layers.*",))
    step(model, example())
    assert handle.audit().layers[0].unmatched == 1


def test_a_plan_for_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="the plan is for 3 decoder layers, the model has 2"):
        ckpt.apply(built(lambda: Stack(MLP(), MLP())), Plan([LayerPlan()] * 3))


# ---- malformed files -----------------------------------------------------------------------------------------------


def valid() -> dict:
    return Plan([LayerPlan(decisions={OpKey("a", "mm", 0): Decision.KEEP}), LayerPlan(replay=False)]).to_dict()


def broken(**changes):
    data = valid()
    group = data["layers"][0]
    for key, value in changes.items():
        (data if key in data and key != "decisions" else group)[key] = value
    return data


BROKEN = {
    "no object": ([1, 2], "is no plan"),
    "no layers": ({"num_layers": 2}, "is no plan"),
    "another schema": (broken(schema_version=99), "schema_version 99, this version reads 1"),
    "no number of layers": (broken(num_layers="two"), "num_layers='two' is not a number"),
    "too many layers": (broken(num_layers=10**9), "is not a number of layers"),
    "layer missing": (broken(num_layers=3), "layer 2 of 3 is missing"),
    "layer out of range": (broken(indices=[7]), "index 7 is no layer of 2"),
    "negative layer": (broken(indices=[-1]), "index -1 is no layer of 2"),
    "layer that is no number": (broken(indices=["0"]), "index '0' is no layer"),
    "layer twice": (broken(indices=[0, 1]), "layer 1 stands twice"),
    "key without number": (broken(decisions={"a/mm": "keep"}), "op key 'a/mm' is malformed"),
    "unknown decision": (broken(decisions={"a/mm#0": "drop"}), "'drop' is not a valid Decision"),
    "decisions that are no table": (broken(decisions=["a/mm#0"]), "malformed"),
    "replay that is no bool": (broken(replay="yes"), "replay='yes'"),
    "unknown inner": (broken(inner="lazy"), "inner='lazy'"),
    "segment that is no number": (broken(segment="first"), "segment='first'"),
    "offload without target": (broken(offload={"to": "host"}), "must name a target, host or disk"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_malformed_plan_is_refused_by_what_is_wrong(case, tmp_path):
    data, message = BROKEN[case]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(path)
    assert "plan.json" in str(caught.value)


def test_files_that_are_no_plan_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        ckpt.FromPlan(str(tmp_path / "missing.json")).policy()
    (tmp_path / "text.json").write_text("{half a plan")
    with pytest.raises(ValueError, match="is no JSON"):
        Plan.load(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is no JSON"):
        Plan.load(tmp_path / "bytes.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Plan.load(tmp_path)
    with pytest.raises(ValueError, match=r"give strategy\.path"):
        ckpt.FromPlan()


def test_an_offload_decision_without_a_target_is_refused():
    model = built(lambda: Stack(MLP()))
    ckpt.apply(model, Plan([LayerPlan(decisions={OpKey("a", "mm", 0): Decision.OFFLOAD})]))
    with pytest.raises(ValueError, match="layer 0 .* the policy offloads a/mm#0 and names no target, host or disk"):
        model(example())
    with pytest.raises(ValueError, match="the policy offloads the input of layer 0 and names no target"):
        ckpt.apply(built(lambda: Stack(MLP())), Plan([LayerPlan(offload_input=True)]))


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_exact_and_keep_what_they_say(seed):
    """By key, another one for each layer."""
    model = zoo.build("llama", dropout=0.1, layers=3)
    batches = [zoo.batch(model, 16, seed=n) for n in range(2)]
    plain = exactness.baseline(model, batches)
    plan = plan_of(model, Keep(), batches[0])
    rng = random.Random(seed)
    for layer in plan.layers:
        layer.decisions = {key: rng.choice(list(Decision)[:2]) for key in layer.decisions}
    plan.layers[rng.randrange(3)] = LayerPlan(replay=False)
    plan = Plan.from_dict(plan.to_dict())
    comparison = exactness.compare(model, plain, lambda m: ckpt.apply(m, plan))
    comparison.raise_if_wrong(f"plan {seed}")
    assert len(comparison.audits[-1].layers) == 2


@pytest.mark.parametrize(
    "field",
    [{"layers": 5}, {"layers": None}, {"source": 5}, {"source": [1]}, {"num_layers": True},
     {"offload": {"target": "disk", "directory": 5}}],
)  # fmt: skip
def test_a_field_of_a_wrong_kind_is_named(field):
    with pytest.raises(ValueError, match=f"^plan: {next(iter(field))}"):
        Plan.from_dict(Plan([LayerPlan()]).to_dict() | field)


def test_a_strategy_in_force_is_told_before_a_plan_is_made():
    model = zoo.build("llama")
    handle = ckpt.apply(model, "full")
    with pytest.raises(ValueError, match="in force on this model already"):
        ckpt.apply(model, ckpt.Auto(budget_gib=1e-6), ckpt.Workload(seq_len=8))
    handle.undo()
