"""The token-wise parts of a model in tiles: exact within 1e-6, the MLP run exactly twice, what is left alone said."""

from __future__ import annotations

import exactness
import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
import ckpt.tiling
from ckpt.engine.chains import find_chains
from ckpt.flops import FlopCounter
from ckpt.layers import find_layers

STRATEGIES = {
    "none": ckpt.KeepAll(),
    "full": ckpt.Full(),
    "every_2": ckpt.EveryN(2),
    "segments_keep": ckpt.Segments(2),
    "segments_replay": ckpt.Segments(2, "replay"),
    "selective": ckpt.Selective("attention+matmul"),
    "offload": ckpt.Offload(),
    "offload_disk": ckpt.Offload("disk"),
}


@pytest.fixture(autouse=True)
def no_norm_is_too_narrow(monkeypatch):
    monkeypatch.setattr(ckpt.tiling, "NARROW_NORM", 0)


def check(model, strategy, tiles=3, lengths=(16, 13), tolerance=1e-6, **settings):
    """Compare with the plain model; return the last step's audit. 13 tokens make a shorter last tile."""
    plain = exactness.baseline(model, [zoo.batch(model, n, seed=n) for n in lengths])
    found = exactness.compare(
        model, plain, lambda m: ckpt.apply(m, strategy, tile_mlp=tiles, **settings), tolerance=tolerance
    )
    found.raise_if_wrong()
    return found.audits[-1]


class TokensOf(TorchDispatchMode):
    """Counts the tokens that pass one op, replays and backward included."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.tokens = f"aten::{name}", 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name == self.name:
            self.tokens += out.shape[:-1].numel()
        return out


def step(model, seq_len=16):
    model.zero_grad(set_to_none=True)
    exactness.loss_of(model(**(inputs := zoo.batch(model, seq_len))), inputs).backward()


# ---- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_exact_with_tiles(strategy):
    check(zoo.build("llama", layers=4), STRATEGIES[strategy], loss="chunked")


@pytest.mark.parametrize("tiles", [2, 64])
def test_any_number_of_tiles_is_exact(tiles):
    check(zoo.build("qwen3", layers=2), "full", tiles, lengths=(16, 5, 2))


def test_attention_dropout_and_tiles_are_exact():
    """Dropout beside the MLP is drawn as without tiles; inside of it, the MLP is left alone (below)."""
    model = zoo.build("llama", dropout=0.2, layers=2)
    assert exactness.draws_random_numbers(model, zoo.batch(model, 16))
    assert check(model, "full").tiles


def test_accumulated_gradients_are_exact():
    model = zoo.build("llama", layers=2)
    batches = [zoo.batch(model, 16, seed=n) for n in range(3)]

    def gradients():
        model.zero_grad(set_to_none=True)
        for batch in batches:
            model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    ckpt.apply(model, ckpt.Offload(), tile_mlp=3)
    for got, want in zip(gradients(), expected, strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


def test_lora_is_exact_and_reaches_into_the_tiles():
    peft = pytest.importorskip("peft")
    model = zoo.build("llama", layers=2)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "gate_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(model, settings)
    inputs = zoo.batch(model, 16)

    def gradients():
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}

    expected = gradients()
    handle = ckpt.apply(model, ckpt.Offload(), tile_mlp=3)
    for _ in range(2):
        for name, got in gradients().items():
            assert (got - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    assert [t.num_passes for t in handle.audit().tiles] == [2.0, 2.0]


def test_evaluation_is_untiled_and_bitwise():
    model = zoo.build("llama", layers=2)
    inputs = zoo.batch(model, 16)
    with torch.no_grad():
        expected = model(**inputs).logits
        handle = ckpt.apply(model, "full", tile_mlp=3)
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(model.eval()(**inputs).logits, expected)
    assert all(chain.tokens_in == 0 for chain in handle.chains.values())


def test_frozen_weights_stay_without_gradient():
    model = zoo.build("llama", layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate_proj" in name or "layers.1.input_layernorm" in name)
    check(model, "full")


@pytest.mark.parametrize("strategy", ["none", "full", "offload"])
@pytest.mark.parametrize("part", ["mlp.up_proj", "post_attention_layernorm"])
def test_a_weight_modified_before_backward_is_an_error_as_in_torch(strategy, part):
    model = zoo.build("llama", layers=2)
    inputs = zoo.batch(model, 16)
    ckpt.apply(model, STRATEGIES[strategy], tile_mlp=3)
    for _ in range(2):
        loss = model(**inputs).loss
        with torch.no_grad():
            model.model.layers[1].get_submodule(part).weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()


def test_weights_that_trade_places_before_backward_are_an_error():
    model = zoo.build("llama", layers=2)
    mlp = model.model.layers[1].mlp
    ckpt.apply(model, "none", tile_mlp=3)
    mlp.gate_proj.weight.requires_grad_(False)
    loss = model(**zoo.batch(model, 16)).loss
    mlp.gate_proj.weight.requires_grad_(True), mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad"):
        loss.backward()


HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, output: output * 1.5),
    "forward_pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,)),
    "backward": lambda m: m.register_full_backward_hook(lambda m, grads, _: tuple(g * 1.5 for g in grads)),
    "backward_pre": lambda m: m.register_full_backward_pre_hook(lambda m, grads: tuple(g * 1.5 for g in grads)),
}


@pytest.mark.parametrize(("kind", "part"), [
    ("forward", "post_attention_layernorm"), ("backward", "post_attention_layernorm"),
    ("backward_pre", "post_attention_layernorm"), ("forward_pre", "mlp"), ("backward", "mlp"), ("backward_pre", "mlp"),
])  # fmt: skip
def test_a_hook_between_the_modules_of_a_tile_is_never_passed_over(kind, part):
    """There before: the part is found without it, or not tiled. Put there after: an error."""
    model = zoo.build("llama", layers=2)
    handle = ckpt.apply(model, "full", tile_mlp=3)
    for layer in model.model.layers:
        HOOKS[kind](layer.get_submodule(part))
    with pytest.raises(RuntimeError, match="runs in tiles, but a hook"):
        step(model)
    handle.undo()
    try:
        check(model, "full")
    except ValueError as error:
        assert "a hook on" in str(error)


@pytest.mark.parametrize(("kind", "part"), [
    ("forward_pre", "post_attention_layernorm"), ("forward", "mlp"), ("backward", "mlp.act_fn"),
    ("backward", "input_layernorm"),
])  # fmt: skip
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_elsewhere_are_exact_with_tiles(kind, part, when):
    model = zoo.build("llama", layers=2)

    def hook():
        return [HOOKS[kind](layer.get_submodule(part)) for layer in model.model.layers]

    hooks = hook()
    expected = exactness.run_step(model, zoo.batch(model, 16))
    if when == "after":
        for handle in hooks:
            handle.remove()
    ckpt.apply(model, "full", tile_mlp=3)
    if when == "after":
        hook()
    for _ in range(2):
        got = exactness.run_step(model, zoo.batch(model, 16))
        assert torch.equal(got.loss, expected.loss)
        for name, gradient in expected.gradients.items():
            assert gradient is None or (got.gradients[name] - gradient).norm() <= 3e-6 * gradient.norm(), name


def test_dropout_that_comes_after_the_tiles_is_an_error():
    model = zoo.build("gpt2", layers=2)
    ckpt.apply(model, "full", tile_mlp=3)
    step(model)
    model.transformer.h[0].mlp.dropout.p = 0.1
    with pytest.raises(RuntimeError, match="dropout 0.1"):
        step(model)


@pytest.mark.parametrize("name", ["post_attention_layernorm", "mlp"])
def test_a_module_of_a_tile_that_is_replaced_afterwards_is_an_error(name):
    model = zoo.build("llama", layers=2)
    handle = ckpt.apply(model, "full", tile_mlp=3)
    step(model)
    width = model.config.hidden_size
    other = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width))
    setattr(model.model.layers[1], name, other)
    with pytest.raises(RuntimeError, match=f"runs in tiles, but {name} was replaced"):
        step(model)
    handle.undo()
    step(model)


# ---- what runs how often ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("strategy", ["none", "full", "selective", "offload"])
def test_the_mlp_runs_exactly_twice(name, strategy):
    model = zoo.build(name, layers=3)
    handle = ckpt.apply(model, STRATEGIES[strategy], tile_mlp=4)
    step(model)
    for _ in range(2):
        with TokensOf("silu") as seen:
            step(model)
        assert seen.tokens == 2 * 3 * 2 * 16  # passes, layers, rows, tokens
    assert {tile.num_passes for tile in handle.audit().tiles} == {2.0}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_tiles_repeat_no_flops_of_a_plain_replay(name):
    """Full replay runs all but the last matmul of a layer again, and so do the tiles, between them."""
    model = zoo.build(name, layers=2)
    flops = []
    for tiles in (1, 4):
        handle = ckpt.apply(model, "full", tile_mlp=tiles)
        step(model)
        with FlopCounter() as counter:
            step(model)
        flops.append(counter.total)
        handle.undo()
    assert flops[0] == flops[1]


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_norm_behind_the_mlp_is_part_of_the_chain_and_replays_it(name):
    audit = check(zoo.build(name, layers=2), "full")
    chain = "pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"
    assert {tile.modules for tile in audit.tiles} == {chain}
    assert {tile.num_passes for tile in audit.tiles} == {2.0}


def test_an_output_that_is_needed_behind_the_chain_is_made_a_third_time_and_said_so():
    """Gemma 3n mixes the MLP's output with another stream."""
    audit = check(zoo.build("gemma3n_text"), "full")
    assert all(tile.num_passes == 3.0 for tile in audit.tiles)
    assert "run 3 times, as what lies behind it needs its output" in str(audit)


def test_on_kept_layers_the_mlp_alone_is_replayed_and_the_audit_says_so():
    model = zoo.build("llama", layers=4)
    handle = ckpt.apply(model, ckpt.EveryN(2), tile_mlp=4)
    step(model)
    with TokensOf("silu") as mlp:
        step(model)
    assert mlp.tokens == 2 * 4 * 2 * 16
    audit = handle.audit()
    assert [tile.only_part for tile in audit.tiles] == [False, True, False, True]
    assert [layer.index for layer in audit.layers] == [0, 2]
    assert "layers 1, 3: post_attention_layernorm > mlp in 4 tiles, run 2 times; the layer keeps" in str(audit)


# ---- what is left alone, and said ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dropout", "reason"), [
    ("mixtral", 0.0, "no dense MLP"),
    ("gpt2", 0.1, "dropout 0.1, whose masks would be drawn tile by tile"),
])  # fmt: skip
def test_a_model_without_a_part_to_tile_is_refused_with_the_reason(name, dropout, reason):
    model = zoo.build(name, dropout=dropout, layers=2)
    with pytest.raises(ValueError, match=reason):
        ckpt.apply(model, "full", tile_mlp=2)
    assert not any("forward" in vars(m) for m in model.modules())


def test_experts_are_left_alone_and_reported():
    """The first layers of this one are dense, the others are mixtures of experts."""
    audit = check(zoo.build("deepseek_v32"), "full")
    dense = {tile.index for tile in audit.tiles}
    assert dense and audit.not_tiled and dense.isdisjoint(audit.not_tiled)
    assert len(dense) + len(audit.not_tiled) == audit.num_layers
    assert "not tiled: it has no dense MLP (a mixture of experts" in str(audit)


def test_norms_that_stand_alone_are_tiled_too():
    model = zoo.build("llama", layers=3)
    assert check(model, "full").num_norms_tiled == 4
    found = find_chains(model, [layer.module for layer in find_layers(model)])
    assert sorted(c.names for c in found.norms) == [("input_layernorm",)] * 3 + [("model.norm",)]


def test_narrow_norms_are_left_whole(monkeypatch):
    model = zoo.build("llama", layers=3)
    width = model.config.hidden_size
    monkeypatch.setattr(ckpt.tiling, "NARROW_NORM", width + 1)
    assert check(model, "full").num_norms_tiled == 0
    monkeypatch.setattr(ckpt.tiling, "NARROW_NORM", width)
    assert check(model, "full").num_norms_tiled == 4


def test_norms_of_single_heads_are_not_taken_for_norms_of_tokens():
    model = zoo.build("qwen3", layers=2)
    found = find_chains(model, [layer.module for layer in find_layers(model)])
    assert not any("q_norm" in name or "k_norm" in name for chain in found.norms for name in chain.names)


def test_undo_takes_the_tiles_back():
    model = zoo.build("llama", layers=2)
    handle = ckpt.apply(model, "full", tile_mlp=4)
    assert sum("forward" in vars(m) for m in model.modules()) == 2 * 3 + 1
    handle.undo()
    assert not any("forward" in vars(m) for m in model.modules())
