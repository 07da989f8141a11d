"""Number formats: what the optimizer updates, what the model computes with, and what both cost."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.config import Optim
from recipes.optim import build_optimizer, build_scheduler
from recipes.precision import prepare


def tiny(tie=False, layers=2):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
        )
    ).train()


def tokens(seed=0, rows=2, length=12):
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def backward(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss


def test_unknown_dtype_names_the_allowed_ones():
    with pytest.raises(ValueError, match="dtype='fp8' is not known. Allowed: fp32, bf16, bf16_pure"):
        prepare(tiny(), "fp8")


def test_fp32_updates_the_models_own_parameters():
    model = tiny()
    assert [p for _, p in prepare(model, "fp32").named_parameters()] == list(model.parameters())


@pytest.mark.parametrize("tie", [False, True])
def test_masters_follow_fp32_adamw_on_the_same_gradients_exactly(tie):
    model = tiny(tie)
    reference = copy.deepcopy(model)
    precision = prepare(model, "bf16")
    optim = Optim(lr=1e-2)
    optimizer = build_optimizer(precision.named_parameters(), optim)
    twin = build_optimizer(reference.named_parameters(), optim)
    for step in range(4):
        backward(model, tokens(step))
        for (name, master), parameter in zip(precision.named_parameters(), reference.parameters(), strict=True):
            assert master.grad is not None, name
            parameter.grad = master.grad.clone()
        optimizer.step()
        precision.after_step()
        precision.zero_grad()
        twin.step()
        for (name, master), parameter in zip(precision.named_parameters(), reference.named_parameters(), strict=True):
            assert torch.equal(master, parameter[1]), name
            assert torch.equal(model.get_parameter(name), parameter[1].bfloat16()), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tie


def test_gradients_of_micro_batches_are_summed_in_fp32():
    model = tiny()
    precision = prepare(model, "bf16")
    parts = []
    for seed in range(3):
        backward(model, tokens(seed))
        parts.append({name: master.grad.clone() for name, master in precision.named_parameters()})
        precision.zero_grad()
    for seed in range(3):
        backward(model, tokens(seed))
    for name, master in precision.named_parameters():
        assert torch.equal(master.grad, parts[0][name] + parts[1][name] + parts[2][name]), name
        assert master.grad.dtype == torch.float32
        assert model.get_parameter(name).grad is None, name


def test_small_updates_are_not_rounded_away():
    """At lr 1e-5 a bf16 weight of 1.0 cannot move by less than 0.0039; its master can, and reaches it in the end."""
    moved = {}
    for dtype in ("bf16", "bf16_pure"):
        model = tiny()
        precision = prepare(model, dtype)
        optimizer = build_optimizer(precision.named_parameters(), Optim(lr=1e-5, weight_decay=0.0))
        before = model.model.norm.weight.detach().clone()
        for step in range(3):
            backward(model, tokens(step))
            optimizer.step()
            precision.after_step()
            precision.zero_grad()
        after = dict(precision.named_parameters())["model.norm.weight"].detach().float()
        moved[dtype] = (after != before.float()).sum().item()
    assert moved == {"bf16": 32, "bf16_pure": 0}


def test_loss_is_close_to_fp32_and_activations_are_bf16():
    model = tiny()
    expected = backward(copy.deepcopy(model), tokens()).item()
    prepare(model, "bf16")
    seen = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert abs(backward(model, tokens()).item() - expected) < 0.02
    assert seen == [torch.bfloat16, torch.bfloat16]


def test_bytes_a_parameter_are_those_of_the_table():
    expected = {"fp32": 16, "bf16": 18, "bf16_pure": 8}
    for dtype, total in expected.items():
        model = tiny()
        count = sum(p.numel() for p in model.parameters())
        precision = prepare(model, dtype)
        optimizer = build_optimizer(precision.named_parameters(), Optim())
        backward(model, tokens())
        optimizer.step()
        held = {}
        for tensor in [*model.parameters(), *(p for _, p in precision.named_parameters())]:
            for each in (tensor, tensor.grad):
                if each is not None:
                    held[each.data_ptr()] = each.nbytes
        for state in optimizer.state.values():
            held |= {value.data_ptr(): value.nbytes for name, value in state.items() if name != "step"}
        assert sum(held.values()) == total * count, dtype


def test_frozen_parameters_have_no_master():
    model = tiny()
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    precision = prepare(model, "bf16")
    assert list(precision.masters) == ["model.norm.weight"]
    backward(model, tokens())
    assert precision.masters["model.norm.weight"].grad is not None
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_buffers_and_modules_that_need_fp32_keep_it():
    model = tiny()
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model._keep_in_fp32_modules_strict = {"norm"}
    precision = prepare(model, "bf16")
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)
    assert model.model.norm.weight.dtype == torch.float32
    assert "model.norm.weight" not in precision.masters
    assert dict(precision.named_parameters())["model.norm.weight"] is model.model.norm.weight
    # "norm" names a module, not a part of a module's name
    assert model.model.layers[0].input_layernorm.weight.dtype == torch.bfloat16


def test_masters_keep_every_bit_of_fp32_weights():
    model = tiny()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, master in prepare(model, "bf16").named_parameters():
        assert torch.equal(master, weights[name])


def test_undo_gives_gradients_back_to_the_model():
    model = tiny()
    precision = prepare(model, "bf16")
    precision.undo()
    backward(model, tokens())
    assert all(p.grad is not None for p in model.parameters())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_weight_decay_spares_vectors():
    model = tiny()
    optimizer = build_optimizer(prepare(model, "fp32").named_parameters(), Optim(lr=1e-2, weight_decay=0.5))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim == 2}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_nothing_to_train_is_an_error_that_says_what_to_do():
    model = tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter.*peft.name=lora"):
        build_optimizer(prepare(model, "bf16").named_parameters(), Optim())


@pytest.mark.parametrize(
    "schedule, warmup, expected",
    [
        ("constant", 0, [1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.5, [0.0, 0.5, 1.0, 0.5]),
        ("linear", 2, [0.0, 0.5, 1.0, 0.5]),
        ("cosine", 0, [1.0, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ("cosine_with_min_lr", 0, [1.0, 0.8681980515339464, 0.55, 0.23180194846605365]),
    ],
)
def test_schedule_follows_its_formula(schedule, warmup, expected):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optim = Optim(lr=1.0, schedule=schedule, warmup=warmup)
    optimizer = build_optimizer([("p", parameter)], optim)
    scheduler = build_scheduler(optimizer, optim, 4)
    seen = []
    for _ in range(4):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx(expected)


def test_warmup_longer_than_the_run_is_an_error():
    optim = Optim(warmup=5)
    optimizer = build_optimizer([("p", torch.nn.Parameter(torch.zeros(1)))], optim)
    with pytest.raises(ValueError, match="optim.warmup=5 steps is more than steps=4"):
        build_scheduler(optimizer, optim, 4)
