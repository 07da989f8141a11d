"""loss="chunked" on models: gradients as with full logits, whatever the head and whatever the labels."""

import copy

import exactness
import pytest
import torch
import zoo
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt.engine.loss import attach_chunked_loss

FAMILIES = {
    "llama": "plain",
    "qwen3": "plain",
    "gemma2": "soft cap",
    "gemma3_text": "tied",
    "cohere": "logit scale, multiplied",
    "granite": "logit scale, divided",
    "gpt2": "tied, no post-norm",
    "phi3": "logits of the tokens kept",
    "mixtral": "loss of the router added after",
    "gpt_oss": "sinks",
    "falcon": "loss function called by position",
    "phi": "biased head",
    "bart": "shifted labels given, own CrossEntropyLoss",
    "xlnet": "head called by a name of its own",
    "ctrl": "shifts logits itself",
    "recurrent_gemma": "soft cap always on",
    "modernbert-decoder": "head after a head",
}
T = 32


def tiny_llama(vocab_size: int = 97, **options) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **options}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes))
    zoo.vary_weights(model, seed=0)
    return model.train()


def batch(vocab_size: int = 97, ignored: int = 5):
    tokens = torch.randint(0, vocab_size, (2, T))
    labels = tokens.clone()
    labels[:, :ignored] = -100
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def step(model, inputs, factor=1.0):
    """Loss and gradients of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    (loss * factor).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(gradients, expected):
    assert gradients.keys() == expected.keys()
    return max(float((gradients[n].double() - g.double()).norm() / g.double().norm()) for n, g in expected.items())


def chunked_step(model, inputs, factor=1.0, chunk_tokens=7):
    attached = attach_chunked_loss(model, chunk_tokens=chunk_tokens)
    try:
        found = step(model, inputs, factor)
        assert attached.report()["mode"] == "chunked", attached.report()
    finally:
        attached.undo()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_full_logits_in_every_family(family):
    model = zoo.build(family, layers=2)
    inputs = zoo.batch(model, seq_len=T)
    inputs["labels"][:, 3:9] = -100
    reports = []

    def attach(model):
        attached = attach_chunked_loss(model, chunk_tokens=7)
        attached.audit = lambda: reports.append(attached.report())
        return attached

    exactness.compare(model, exactness.baseline(model, [inputs]), attach, tolerance=1e-6).raise_if_wrong(family)
    assert [report["mode"] for report in reports] == ["chunked"], reports


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gpt2"])
def test_gradients_are_as_near_to_float64_as_those_of_full_logits(family, monkeypatch):
    model = zoo.build(family, layers=2)
    inputs = zoo.batch(model, seq_len=T)
    _, full = step(model, inputs)
    _, chunked = chunked_step(model, inputs)
    exact = copy.deepcopy(model).double()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # models cast logits to fp32, fp64 ones too
        loss64, full64 = step(exact, inputs)
        chunked_loss64, chunked64 = chunked_step(exact, inputs)
    assert loss64.dtype == chunked_loss64.dtype == torch.float64
    assert largest_error(chunked64, full64) < 1e-12
    # What float64 and all errors of the layers say together: the chunks add nothing.
    assert largest_error(chunked, full64) <= 1.5 * largest_error(full, full64)
    assert largest_error(chunked, full) <= 1e-6


def test_the_routers_loss_is_added_as_ever():
    model = zoo.build("mixtral", layers=2)
    inputs = {**zoo.batch(model, seq_len=T), "output_router_logits": True}
    loss, full = step(model, inputs)
    plain_loss, _ = step(model, {**inputs, "output_router_logits": False})
    assert loss != plain_loss
    chunked_loss, chunked = chunked_step(model, inputs)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


@pytest.mark.parametrize("frozen", ["head", "all but the head", "bias alone trains"])
def test_frozen_parts_get_no_gradient_and_the_rest_the_same(frozen):
    model = tiny_llama()
    model.lm_head = nn.Linear(32, 97, bias=True)
    for name, parameter in model.named_parameters():
        in_head = name.startswith("lm_head")
        parameter.requires_grad_({"head": not in_head, "all but the head": in_head}.get(frozen, name == "lm_head.bias"))
    inputs = batch()
    _, full = step(model, inputs)
    _, chunked = chunked_step(model, inputs)
    assert largest_error(chunked, full) <= 1e-6


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ignored", [0, 1, 3, T - 2])
def test_positions_without_a_label_do_not_count(ignored, tied):
    model, inputs = tiny_llama(tie_word_embeddings=tied), batch(ignored=ignored)
    loss, full = step(model, inputs)
    chunked_loss, chunked = chunked_step(model, inputs)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)])
def test_a_batch_without_a_label_gives_zero_loss_and_gradients(num_items):
    model, inputs = tiny_llama(), batch(ignored=T)
    if num_items is not None:
        inputs["num_items_in_batch"] = num_items
    loss, gradients = chunked_step(model, inputs)
    assert loss == 0
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    assert all(not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("num_items", [77, torch.tensor(77)])
def test_the_loss_is_divided_by_the_global_count_of_labels(num_items):
    model, inputs = tiny_llama(), batch(ignored=5)
    mean, _ = chunked_step(model, inputs)
    inputs["num_items_in_batch"] = num_items
    loss, full = step(model, inputs)
    chunked_loss, chunked = chunked_step(model, inputs)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    # T - 5 labels a row, none of them first in its row
    torch.testing.assert_close(chunked_loss, mean * (2 * (T - 5)) / 77, rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


@pytest.mark.parametrize("extra", ["shift_labels", "ignore_index", "logits_to_keep"])
def test_arguments_of_the_loss_mean_what_they_mean_with_full_logits(extra):
    model, inputs = tiny_llama(), batch(ignored=0)
    inputs |= {
        "shift_labels": {"shift_labels": inputs["labels"].roll(-2, dims=1)},
        "ignore_index": {"ignore_index": int(inputs["labels"][0, -1])},
        "logits_to_keep": {"logits_to_keep": 8, "labels": inputs["labels"][:, -8:]},
    }[extra]
    loss, full = step(model, inputs)
    chunked_loss, chunked = chunked_step(model, inputs)
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


@pytest.mark.parametrize("how", ["bf16 weights", "autocast", "fp16 autocast", "bf16 weights, autocast"])
def test_half_precision_is_no_further_from_the_truth_than_full_logits(how):
    model, inputs = tiny_llama(vocab_size=517), batch(vocab_size=517)
    truth_loss, truth = step(copy.deepcopy(model).double(), inputs)
    if "bf16 weights" in how:
        model.bfloat16()
    dtype = torch.float16 if "fp16" in how else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled="autocast" in how):
        loss, full = step(model, inputs)
        chunked_loss, chunked = chunked_step(model, inputs)
    assert chunked_loss.dtype == torch.float32
    assert abs(chunked_loss - truth_loss) <= abs(loss - truth_loss) + 1e-5 * truth_loss
    head_error = [largest_error({"": g["lm_head.weight"]}, {"": truth["lm_head.weight"]}) for g in (chunked, full)]
    assert head_error[0] <= 1.05 * head_error[1]
    assert largest_error(chunked, truth) <= 1.05 * largest_error(full, truth)
    assert all(chunked[name].dtype == gradient.dtype for name, gradient in full.items())


def test_an_fp64_model_has_the_gradients_of_full_logits():
    model, inputs = tiny_llama().double(), batch()
    (loss, full), (chunked_loss, chunked) = step(model, inputs), chunked_step(model, inputs)
    torch.testing.assert_close(chunked_loss.float(), loss.float(), rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


def test_a_bf16_heads_gradient_does_not_lose_digits_with_the_number_of_chunks():
    hidden, labels = torch.randn(1, 4096, 32), torch.randint(0, 97, (1, 4096))
    errors = {}
    for chunk_tokens in (8, 4096):
        model = tiny_llama(num_hidden_layers=0).bfloat16()
        truth = copy.deepcopy(model).double()
        inputs = {"inputs_embeds": hidden.bfloat16(), "labels": labels, "use_cache": False}
        _, exact = step(truth, {**inputs, "inputs_embeds": inputs["inputs_embeds"].double()})
        _, found = chunked_step(model, inputs, chunk_tokens=chunk_tokens)
        errors[chunk_tokens] = largest_error({"": found["lm_head.weight"]}, {"": exact["lm_head.weight"]})
    assert errors[8] <= 1.2 * errors[4096]


def test_scaled_and_accumulated_losses_scale_and_add():
    model, inputs = tiny_llama(tie_word_embeddings=True), batch()
    _, once = step(model, inputs)
    _, scaled = chunked_step(model, inputs, factor=65536.0)
    assert largest_error({name: g / 65536 for name, g in scaled.items()}, once) <= 1e-6
    attached = attach_chunked_loss(model, chunk_tokens=7)
    model.zero_grad()
    for _ in range(3):
        (model(**inputs).loss / 3).backward()
    assert largest_error({name: p.grad for name, p in model.named_parameters()}, once) <= 1e-6
    attached.undo()


def test_a_second_loss_of_the_same_logits_adds_its_gradient():
    model, inputs = tiny_llama(), batch()

    def both(model):
        model.zero_grad()
        outputs = model(**inputs)
        (outputs.loss + 1e-2 * outputs.logits.logsumexp(-1).square().mean()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    full = both(model)
    attached = attach_chunked_loss(model, chunk_tokens=7)
    chunked = both(model)
    assert largest_error(chunked, full) <= 1e-6
    assert attached.report()["reason"] == "1 loss in chunks of 7 tokens; logits were then read by logsumexp"
    attached.undo()


def test_a_second_backward_and_a_second_derivative_are_refused():
    model, inputs = tiny_llama(), batch()
    attached = attach_chunked_loss(model, chunk_tokens=7)
    loss = model(**inputs).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    loss = model(**inputs).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    attached.undo()
