"""What is shown of a strategy is what the engine does: its ops, bytes and FLOPs, by kind of layer; plans compare."""

import pytest
import torch

import ckpt
from ckpt.explain import FREE, KEEP, RECOMPUTE, explain, plan_of
from ckpt.hardware import find
from ckpt.plan_diff import diff
from ckpt.predict import predict
from ckpt.workload import Workload
from scripts.predict_table import build, config_of
from scripts.predict_table import measure as measure_peak

WORK = Workload(batch_size=1, seq_len=64, dtype="fp32", optimizer=None, loss="full")


@pytest.fixture(scope="module")
def selective():
    return predict(config_of("llama"), "selective", WORK)


def test_rows_add_up_to_what_the_engine_counts_on_a_real_step(selective):
    model = build("llama")
    handle = ckpt.apply(model, "selective")
    ids = torch.zeros(1, 64, dtype=torch.long)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    (kind,), audit = explain(selective), handle.audit().layers
    assert kind.layers == (0, 1, 2, 3) and kind.rule == "replayed"
    for layer in audit:
        assert kind.kept_bytes == layer.kept_bytes
        assert kind.replay_flops == layer.flops_run_again
        assert sum(row.decision == KEEP for row in kind.ops) == layer.ops_kept
    assert sum(row.flops * row.times_run_again for row in kind.ops) == kind.replay_flops
    assert kind.input_bytes == 64 * 128 * 4


def test_each_op_has_both_price_tags_and_a_reason(selective):
    (kind,) = explain(selective, device=find("h100"))
    rows = {row.op: row for row in kind.ops}
    q, attention, down = (rows[k] for k in ("self_attn.q_proj/mm#0", "self_attn/attention#0", "mlp.down_proj/mm#0"))
    assert (q.num_bytes, q.flops, q.decision) == (64 * 128 * 4, 2 * 64 * 128 * 128, RECOMPUTE)
    assert q.flops_per_byte == 2 * 128 / 4 and "64 FLOPs a byte" in q.why
    assert attention.decision == KEEP and attention.times_run_again == 0
    assert down.decision == FREE and down.why == "nobody reads it again"
    assert all(row.seconds > 0 for row in kind.ops) and kind.replay_seconds > 0
    assert kind.to_dict()["ops"][0]["why"]


@pytest.mark.slow
def test_layers_that_do_other_things_are_told_apart():
    config = config_of("llama")
    every = predict(config, ckpt.EveryN(2), WORK)
    records = {i: p.record for i, p in predict(config, "full", WORK).programs.items()}
    replayed, whole = explain(every, records=records)
    assert (replayed.layers, whole.layers) == ((0, 2), (1, 3))
    assert (replayed.rule, whole.rule) == ("replayed", "kept whole")
    assert {row.decision for row in whole.ops} == {KEEP, FREE} and whole.replay_flops == 0
    first, rest = explain(predict(config, ckpt.Segments(2), WORK))
    assert first.layers == (0, 2) and first.input_bytes > 0 == rest.input_bytes
    kinds = [kind.name for kind in explain(predict(config_of("qwen3_next"), "full", WORK))]
    assert kinds == ["linear_attention", "full_attention"]


def test_the_plan_of_a_prediction_does_what_the_strategy_does(selective):
    plan = plan_of(selective, {"strategy": "selective"})
    measured = measure_peak(build("llama"), plan, WORK)
    assert predict(config_of("llama"), plan, WORK).peak_bytes == selective.peak_bytes == measured
    assert not diff(plan, plan_of(predict(config_of("llama"), plan, WORK)))


def test_no_strategy_has_no_plan():
    with pytest.raises(ValueError, match="no strategy was in force"):
        plan_of(predict(config_of("gpt2"), None, WORK.replace(seq_len=8)))


def test_a_diff_names_what_holds_for_all_layers():
    rows, disk = [ckpt.plan.LayerPlan()], {"target": "disk", "directory": None}
    plain = ckpt.Plan(rows)
    for other, told in (
        (ckpt.Plan(rows, loss="chunked"), ("loss", "as the run says", "chunked")),
        (ckpt.Plan(rows, tile_mlp=8), ("tile_mlp", "as the run says", "8")),
        (ckpt.Plan(rows, offload=disk), ("offload", "nowhere", "disk")),
        (ckpt.Plan(rows, offload=disk | {"directory": "/fast"}), ("offload", "nowhere", "disk, /fast")),
    ):
        assert [(c.what, c.a, c.b) for c in diff(plain, other)] == [told]


def test_a_diff_names_layers_and_ops_once(selective):
    config = config_of("llama")
    a = plan_of(selective)
    b = plan_of(predict(config, ckpt.Selective("attention+matmul"), WORK))
    changes = {change.what: change for change in diff(a, b)}
    assert changes["mlp.up_proj/mm#0"].layers == (0, 1, 2, 3)
    assert (changes["mlp.up_proj/mm#0"].a, changes["mlp.up_proj/mm#0"].b) == ("recompute", "keep")
    assert "self_attn/attention#0" not in changes
    whole = diff(a, plan_of(predict(config, ckpt.EveryN(2), WORK)))[0]
    assert (whole.layers, whole.what, whole.a, whole.b) == ((1, 3), "layer", "replayed", "kept whole")
    away = diff(a, plan_of(predict(config, ckpt.Offload("disk"), WORK)))
    assert (away[0].what, away[0].a, away[0].b) == ("offload", "nowhere", "disk")
    with pytest.raises(ValueError, match="plans are for 4 and 2 decoder layers"):
        diff(a, ckpt.Plan(a.layers[:2]))
