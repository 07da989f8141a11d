"""The training loop: what a step computes, and that a run can stop anywhere and go on as if it had not."""

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import signal
import types

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from ckpt.parallel import Degrees
from recipes.config import Config, Eval, Optim
from recipes.distributed import Ranks
from recipes.loop import batch_loss, evaluate, loss_takes_num_items, optimizer_step, train
from recipes.meter import Meter, Peak
from recipes.optim import build_optimizer, build_scheduler
from recipes.precision import prepare
from recipes.rng import seed_everything
from recipes.rundir import RunStopped, open_run
from recipes.train_state import TrainState

TIMES = {
    "step_seconds",
    "tokens_per_second",
    "model_flops_utilization",
    "hardware_flops_utilization",
}
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_batch(seed, rows=2, length=12, ignored=0):
    """A batch as recipes/data makes them; the first `ignored` labels of each row do not count."""
    ids = torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :ignored] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "num_tokens": ids.numel(),
        "num_labels": int((labels[:, 1:] != -100).sum()),
    }


class Stream:
    """Batches in an order of its own for each epoch of five; with `augment`, changed by the global generators."""

    def __init__(self, augment=False):
        self.augment, self.position = augment, 0

    def __next__(self):
        epoch, at = divmod(self.position, 5)
        order = random.Random(epoch).sample(range(5), 5)
        self.position += 1
        batch = make_batch(order[at], ignored=order[at] % 3)
        if self.augment:
            batch["input_ids"][torch.randint(2, (1,)), random.randrange(12)] = 0
        return batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@dataclasses.dataclass
class FakeData:
    train: Stream

    def eval(self, num_batches):
        for seed in range(num_batches):
            torch.rand(1)  # an evaluation that draws must not disturb training
            yield make_batch(100 + seed, ignored=seed)


class NoProbe:
    profiled = 0

    def due(self, step):
        return False

    def profile(self, step):
        return contextlib.nullcontext()


def model_of(dropout=0.0, kind=LlamaForCausalLM, config=LlamaConfig, **extra):
    return kind(config(**SHAPE, attention_dropout=dropout, attn_implementation="eager", **extra)).train()


def config(tmp_path, name="run", **values):
    defaults = {"steps": 7, "tracker": "none", "optim": Optim(lr=1e-2, warmup=2), "eval": Eval(batches=0)}
    return Config(name=name, runs_dir=str(tmp_path), **(defaults | values))


def start(cfg, dropout=0.0, augment=False, seed=0, hook=None):
    """Train as cfg says with a tiny model; return (status, model, lines of metrics.jsonl without times)."""
    seed_everything(seed)
    model = model_of(dropout)
    precision = prepare(model, cfg.dtype)
    optimizer = build_optimizer(precision.named_parameters(), cfg.optim)
    data = FakeData(Stream(augment))
    state = TrainState(model, precision, optimizer, build_scheduler(optimizer, cfg.optim, cfg.steps), data.train)
    with contextlib.suppress(RunStopped), open_run(cfg) as run:
        run.console.rich.quiet = run.console.results.quiet = True
        first = 0
        if cfg.resume:
            first = state.load_newest(run.train_state)
            run.rewind(first)
        if hook:
            hook(state, run)
        train(cfg, state, data, run, Meter(torch.device("cpu"), Peak(1e12, "")), NoProbe(), first)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return run, model, [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def interrupt_after(step, number=signal.SIGTERM):
    """Send this process a signal in the middle of step `step`."""

    def hook(state, run):
        forward = state.model.forward

        def wrapped(*args, **kwargs):
            if state.scheduler.last_epoch == step - 1 and torch.is_grad_enabled():
                os.kill(os.getpid(), number)
            return forward(*args, **kwargs)

        state.model.forward = wrapped

    return hook


def same(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"dropout": 0.2},
        {"augment": True},
        {"grad_accum": 3},
        {"dtype": "bf16", "grad_accum": 2, "dropout": 0.2, "augment": True},
        {"steps": 13, "save_every": 8},
    ],
    ids=["plain", "dropout", "augmentation", "accumulation", "all", "second epoch"],
)
def test_resumed_run_logs_what_the_uninterrupted_one_logs(tmp_path, case):
    options = {key: case.pop(key) for key in ("dropout", "augment") if key in case}
    values = {"save_every": 3, "eval": Eval(every=2, batches=2)} | case
    _, whole, expected = start(config(tmp_path, "whole", **values), **options)
    stop = values["save_every"] + 2  # two steps beyond the save: a kill loses them, a resumed run makes them again

    class KilledError(BaseException):
        pass

    def kill(state, run):
        log = run.log

        def log_or_die(metrics):
            log(metrics)
            if metrics["step"] == stop:
                raise KilledError

        run.log = log_or_die

    with pytest.raises(KilledError):
        start(config(tmp_path, "halves", **values), **options, hook=kill)
    run, resumed, lines = start(config(tmp_path, "halves", resume=True, **values), **options, seed=99)
    assert lines == expected
    assert same(whole, resumed)
    assert run.status == "ok" and run.summary["first_loss"] == expected[0]["loss"]


def test_two_runs_with_one_seed_log_the_same(tmp_path):
    values = {"eval": Eval(every=2, batches=2)}
    _, _, first = start(config(tmp_path, "a", **values), dropout=0.2, augment=True)
    _, _, second = start(config(tmp_path, "b", **values), dropout=0.2, augment=True)
    assert first == second and len(first) == 7
    assert first != start(config(tmp_path, "c", **values), dropout=0.2, augment=True, seed=1)[2]


def test_evaluation_does_not_change_training(tmp_path):
    _, plain, lines = start(config(tmp_path, "a"), dropout=0.2)
    _, evaluated, more = start(config(tmp_path, "b", eval=Eval(every=1, batches=2)), dropout=0.2)
    assert same(plain, evaluated)
    assert [line["loss"] for line in lines] == [line["loss"] for line in more]
    assert all("eval_loss" in line for line in more)


def test_the_loss_falls_and_the_last_state_is_saved(tmp_path):
    run, _, lines = start(config(tmp_path, steps=40, log_every=10))
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["loss"] < 0.75 * run.summary["first_loss"]
    assert [path.name for path in run.train_state.iterdir()] == ["step_00000040"]
    assert lines[-1]["total_tokens"] == 40 * 24


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_records_interrupted(tmp_path, number):
    _, whole, expected = start(config(tmp_path, "whole"))
    before = signal.getsignal(number)
    run, _, lines = start(config(tmp_path, "cut"), hook=interrupt_after(3, number))
    assert signal.getsignal(number) is before
    assert run.status == "interrupted" and len(lines) == 3
    assert f"resume={run.path}" in run.summary["error"]
    _, resumed, lines = start(config(tmp_path, "cut", resume=True), seed=99)
    assert lines == expected and same(whole, resumed)


def test_nan_loss_stops_with_its_status_and_leaves_the_weights_alone(tmp_path):
    kept = {}

    def poison(state, run):
        forward = state.model.forward

        def wrapped(*args, **kwargs):
            out = forward(*args, **kwargs)
            if state.scheduler.last_epoch == 3:
                out.loss = out.loss * math.nan
                kept.update(weights=copy.deepcopy(state.model.state_dict()))
            return out

        state.model.forward = wrapped

    run, model, lines = start(config(tmp_path), hook=poison)
    assert run.status == "nan"
    assert "at step 4" in run.summary["error"] and "optim.lr" in run.summary["error"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(torch.equal(value, kept["weights"][name]) for name, value in model.state_dict().items())


def test_infinite_gradients_stop_too():
    model = model_of()
    state = bare_state(model)
    model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(RunStopped, match="gradient norm") as caught:
        optimizer_step(state, [make_batch(0)], 1.0, True, 5)
    assert caught.value.status == "nan" and "step 4" in str(caught.value)


def bare_state(model, dtype="fp32", optim=None):
    optim = optim or Optim(lr=1e-2, warmup=0, schedule="constant")
    precision = prepare(model, dtype)
    optimizer = build_optimizer(precision.named_parameters(), optim)
    return TrainState(model, precision, optimizer, build_scheduler(optimizer, optim, 10), Stream())


def joined(batches):
    out = {key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")}
    return out | {key: sum(batch[key] for batch in batches) for key in ("num_tokens", "num_labels")}


def test_accumulation_equals_one_big_batch():
    """Micro-batches with 22, 16 and 2 labels that count: dividing each by its own count would weigh them wrongly."""
    batches = [make_batch(0), make_batch(1, ignored=4), make_batch(2, ignored=11)]
    results = []
    for split in (batches, [joined(batches)]):
        torch.manual_seed(0)
        state = bare_state(model_of())
        results.append((state, optimizer_step(state, split, 0.0, True, 1)))
    (small, (loss, norm)), (big, (expected, expected_norm)) = results
    assert loss == pytest.approx(expected, rel=1e-6) and norm == pytest.approx(expected_norm, rel=1e-5)
    for p, q in zip(small.model.parameters(), big.model.parameters(), strict=True):
        # Adam's first step is lr * sign(g): only elements whose gradient is rounding noise may differ.
        assert ((p - q).abs() > 1e-4).float().mean() < 1e-3
    logits = model_of_seed(0)(joined(batches)["input_ids"]).logits[:, :-1]
    labels = joined(batches)["labels"][:, 1:]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert loss == pytest.approx(by_hand.item(), rel=1e-6)


def model_of_seed(seed):
    torch.manual_seed(seed)
    return model_of()


def test_micro_batch_without_labels_adds_nothing():
    empty, full = make_batch(1, ignored=12), make_batch(0)
    assert empty["num_labels"] == 0
    a, b = bare_state(model_of_seed(0)), bare_state(model_of_seed(0))
    assert optimizer_step(a, [full, empty], 1.0, True, 1) == optimizer_step(b, [full], 1.0, True, 1)
    assert same(a.model, b.model)


def test_step_without_any_label_has_loss_zero_and_no_nan():
    state = bare_state(model_of_seed(0), optim=Optim(lr=1e-2, warmup=0, weight_decay=0.0))
    before = copy.deepcopy(state.model)
    assert optimizer_step(state, [make_batch(0, ignored=12)], 1.0, True, 1) == (0.0, 0.0)
    assert same(before, state.model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_clipping_bounds_the_gradient_of_all_parameters_together(dtype):
    state = bare_state(model_of_seed(0), dtype)
    seen = {}

    def look(optimizer, args, kwargs):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen["norm"] = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads])).item()

    state.optimizer.register_step_pre_hook(look)
    _, norm = optimizer_step(state, [make_batch(0)], 0.1, True, 1)
    assert norm > 0.2 and seen["norm"] == pytest.approx(0.1, rel=1e-4)
    _, norm = optimizer_step(state, [make_batch(0)], 1000.0, True, 1)
    assert seen["norm"] == pytest.approx(norm, rel=1e-6)


def test_router_loss_counts_once_whatever_the_accumulation():
    """Two equal micro-batches are one batch twice over: the same loss, its auxiliary part included."""
    torch.manual_seed(0)
    model = model_of(
        kind=MixtralForCausalLM, config=MixtralConfig, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    batch = make_batch(0)
    once = optimizer_step(bare_state(copy.deepcopy(model)), [batch], 0.0, True, 1)
    twice = optimizer_step(bare_state(copy.deepcopy(model)), [batch, batch], 0.0, True, 1)
    assert twice == pytest.approx(once, rel=1e-5)
    without = copy.deepcopy(model)
    without.config.output_router_logits = False
    assert once[0] > optimizer_step(bare_state(without), [batch], 0.0, True, 1)[0] + 0.4


class TwoAlike(Ranks):
    """One of two ranks that hold equal rows: what both sum up is twice the own."""

    def __init__(self):
        degrees = Degrees(shard=2)
        layout = types.SimpleNamespace(degrees=degrees, place=degrees.place(0), device_type="cpu")
        layout.sum = lambda values: values * 2
        super().__init__(0, 2, layout)


def test_router_loss_counts_once_in_the_held_out_loss_of_several_ranks():
    torch.manual_seed(0)
    model = model_of(
        kind=MixtralForCausalLM, config=MixtralConfig, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=0.5,
    )  # fmt: skip
    alone = evaluate(model, [make_batch(0)], True)
    assert evaluate(model, [make_batch(0)], True, TwoAlike()) == pytest.approx(alone, rel=1e-6)


class MeanLoss(torch.nn.Module):
    """A model that accepts `num_items_in_batch` and ignores it, as some do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, labels=None, **kwargs):
        kwargs.pop("num_items_in_batch", None)
        return CausalLMOutput(loss=self.inner(input_ids=input_ids, labels=labels, **kwargs).loss)


def test_model_that_ignores_the_count_of_labels_is_found_out_and_weighed_right():
    model = MeanLoss(model_of_seed(0))
    assert loss_takes_num_items(model) is False and loss_takes_num_items(model.inner) is True
    batches = [make_batch(0), make_batch(1, ignored=11), make_batch(2, ignored=12)]
    expected = optimizer_step(bare_state(model_of_seed(0)), batches, 0.0, True, 1)
    assert optimizer_step(bare_state(model), batches, 0.0, False, 1) == pytest.approx(expected, rel=1e-6)


def test_asking_the_model_leaves_no_trace():
    seed_everything(0)
    model = model_of(dropout=0.2)
    seen = torch.get_rng_state()
    loss_takes_num_items(model)
    assert torch.equal(torch.get_rng_state(), seen) and model.training
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_is_the_mean_over_labels_in_eval_mode():
    model = model_of_seed(0)
    batches = [make_batch(0), make_batch(1, ignored=9), make_batch(2, ignored=12)]
    both = joined(batches)
    with torch.no_grad():
        expected = model.eval()(input_ids=both["input_ids"], labels=both["labels"]).loss.item()
    model.train()
    assert evaluate(model, batches, True) == pytest.approx(expected, rel=1e-6)
    assert model.training
    assert evaluate(model, [make_batch(2, ignored=12)], True) is None


def test_every_forward_runs_without_a_cache_and_the_config_keeps_its_own_value(tmp_path):
    seen = []

    def watch(state, run):
        state.model.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append(kwargs["use_cache"]), with_kwargs=True
        )

    _, model, _ = start(config(tmp_path, steps=3, eval=Eval(batches=1)), hook=watch)
    assert len(seen) >= 3 and set(seen) == {False}
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["use_cache"] is True


def test_saved_model_has_equal_logits_in_plain_transformers(tmp_path):
    _, model, _ = start(config(tmp_path, steps=3, dtype="bf16"))
    model.save_pretrained(tmp_path / "saved")
    ids = make_batch(0)["input_ids"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto", attn_implementation="eager").eval()
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_loss_of_a_micro_batch_is_its_sum_over_the_steps_count():
    model, batch = model_of_seed(0), make_batch(0)
    whole = batch_loss(model, batch, batch["num_labels"], 1, True).item()
    assert batch_loss(model, batch, 4 * batch["num_labels"], 4, True).item() == pytest.approx(whole / 4, rel=1e-6)
