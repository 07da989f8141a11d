"""What attach_chunked_loss puts on a model, what it leaves alone, and that it can be told and undone."""

import copy
import gc
import inspect
import io
import logging
import pickle
import weakref

import peft
import pytest
import snapshots
import torch
from test_loss import T, batch, largest_error, step, tiny_llama
from torch import nn
from torch._dynamo.testing import CompileCounter

from ckpt.engine.lazy_logits import LazyLogits
from ckpt.engine.loss import attach_chunked_loss


def test_report_tells_head_mode_and_reason():
    model = tiny_llama()
    attached = attach_chunked_loss(model, chunk_tokens=7)
    expected = {
        "head": "lm_head",
        "mode": "not run",
        "reason": "no call with labels yet",
        "chunk_tokens": 7,
        "calls": 0,
    }
    assert attached.report() == expected
    model(**batch())
    expected |= {"mode": "chunked", "reason": "1 loss in chunks of 7 tokens", "calls": 1}
    assert attached.report() == expected


@pytest.mark.parametrize("after", ["at once", "a step", "evaluation and generation"])
def test_undo_leaves_every_attribute_as_it_was(after):
    model = tiny_llama()
    model.generate(batch()["input_ids"][:, :3], max_new_tokens=1)  # sets attributes of its own once
    model.loss_function = model.loss_function  # someone's own instance attribute
    before = snapshots.take(model)
    attached = attach_chunked_loss(model, chunk_tokens=7)
    if after == "a step":
        step(model, batch())
        model.zero_grad(set_to_none=True)
    elif after != "at once":
        model.eval().generate(batch()["input_ids"][:, :3], max_new_tokens=2)
        model.train()
    attached.undo()
    attached.undo()
    assert snapshots.differences(before, snapshots.take(model)) == []


def test_undo_leaves_what_others_put_over_it_and_says_so(caplog):
    model, inputs = tiny_llama(), batch()
    _, full = step(model, inputs)
    attached = attach_chunked_loss(model, chunk_tokens=7)
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    attached.undo()
    assert "LlamaForCausalLM.forward was replaced by other code" in caplog.text
    assert type(model(**inputs).logits) is torch.Tensor
    assert largest_error(step(model, inputs)[1], full) == 0


@pytest.mark.parametrize("chunk_tokens", [0, -1, 1.5, True, "auto"])
def test_a_chunk_is_a_positive_number_of_tokens(chunk_tokens):
    with pytest.raises(ValueError, match="give an int >= 1, or None"):
        attach_chunked_loss(tiny_llama(), chunk_tokens=chunk_tokens)


def test_attaching_twice_is_refused():
    model = tiny_llama()
    attached = attach_chunked_loss(model)
    with pytest.raises(ValueError, match="already has a chunked loss"):
        attach_chunked_loss(model)
    attached.undo()
    attach_chunked_loss(model).undo()


def test_a_copy_uses_its_own_head():
    model, inputs = tiny_llama(), batch()
    attached = attach_chunked_loss(model, chunk_tokens=7)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    attached.undo()
    plain = tiny_llama()
    _, expected = step(plain, inputs)
    for twin in copies:
        outputs = twin(**inputs)
        assert isinstance(outputs.logits, LazyLogits)
        assert outputs.logits.state.call.head is twin.lm_head
        assert largest_error(step(twin, inputs)[1], expected) <= 1e-6
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_kept_alive_by_cycles():
    model, inputs = tiny_llama(), batch()
    attached = attach_chunked_loss(model, chunk_tokens=7)
    gc.collect()
    gc.disable()
    try:
        outputs = model(**inputs)
        hidden = weakref.ref(outputs.logits.state.hidden)
        outputs.loss.backward()
        assert hidden() is not None
        del outputs
        assert hidden() is None
        alive = weakref.ref(model)
        del model, attached
        assert alive() is None
    finally:
        gc.enable()


def test_calls_without_labels_are_as_before():
    model, inputs = tiny_llama(), batch()
    tokens = inputs["input_ids"]
    expected, generated = model(tokens).logits, model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
    attach_chunked_loss(model)
    found = model(tokens).logits
    assert type(found) is torch.Tensor
    assert torch.equal(found, expected)
    assert torch.equal(model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False), generated)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_gets_the_loss_in_chunks_and_its_logits_when_it_reads_them(context):
    model, inputs = tiny_llama().eval(), batch()
    with context():
        expected = model(**inputs)
        attached = attach_chunked_loss(model, chunk_tokens=7)
        found = model(**inputs)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        assert attached.report()["mode"] == "chunked"
        assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
        assert torch.equal(found.logits.cpu(), expected.logits)
        assert torch.equal(torch.cat([found.logits, found.logits]), torch.cat([expected.logits] * 2))
    assert found.logits.tolist() == expected.logits.tolist()
    assert not found.loss.requires_grad


def test_the_signature_is_the_models_own():
    model = tiny_llama()
    before = inspect.signature(model.forward)
    attach_chunked_loss(model)
    assert inspect.signature(model.forward) == before


def test_labels_may_come_by_position():
    model, inputs = tiny_llama(), batch()
    expected = model(**inputs).loss
    attached = attach_chunked_loss(model, chunk_tokens=7)
    torch.testing.assert_close(model(inputs["input_ids"], None, None, None, None, inputs["labels"]).loss, expected)
    assert attached.report()["mode"] == "chunked"


def with_lora(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options))


PEFT = {
    "LoRA on the head": lambda m: with_lora(m, target_modules=["q_proj", "lm_head"]),
    "LoRA beside a frozen head": lambda m: with_lora(m, target_modules=["q_proj"]),
    "a head trained whole": lambda m: with_lora(m, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "virtual tokens": lambda m: peft.get_peft_model(
        m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ),
}


@pytest.mark.parametrize("how", PEFT)
def test_adapters_get_the_gradients_of_full_logits(how):
    model, inputs = PEFT[how](tiny_llama()), batch()
    loss, full = step(model, inputs)
    attached = attach_chunked_loss(model, chunk_tokens=7)
    chunked_loss, chunked = step(model, inputs)
    assert attached.report()["mode"] == "chunked"
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert largest_error(chunked, full) <= 1e-6


class Mixing(nn.Linear):
    """A head whose rows depend on each other."""

    def forward(self, hidden):
        return super().forward(hidden - hidden.mean(0, keepdim=True))


def mixing_head(model):
    head = Mixing(32, 97)
    model.set_output_embeddings(head)
    return model


def test_a_loss_function_of_ones_own_is_called_with_what_the_model_gives_it():
    model, inputs = tiny_llama(), batch()
    model.loss_function = lambda logits, labels, vocab_size: (
        3 * nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))
    )
    _, full = step(model, inputs)
    attached = attach_chunked_loss(model, chunk_tokens=7)
    _, chunked = step(model, inputs)
    assert attached.report()["mode"] == "chunked"
    assert largest_error(chunked, full) <= 1e-6


def sorting_model(model):
    loss_function = model.loss_function
    model.loss_function = lambda logits, labels, **kwargs: loss_function(logits.sort(-1).values, labels, **kwargs)
    return model


def own_head_model(model):
    class Inner(type(model)):
        def forward(self, input_ids=None, labels=None, use_cache=None):
            logits = self.model(input_ids, use_cache=use_cache).last_hidden_state @ self.lm_head.weight.T
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=97)
            return type(self).Output(loss=loss, logits=logits)

    from transformers.modeling_outputs import CausalLMOutputWithPast

    Inner.Output = CausalLMOutputWithPast
    model.__class__ = Inner
    return model


FULL_LOGITS = {
    "the head has dropout": lambda m: with_lora(m, target_modules=["lm_head"], lora_dropout=0.1),
    "depends on other rows": mixing_head,
    "applies sort to its logits": sorting_model,
    "without calling its head": own_head_model,
}


@pytest.mark.parametrize("reason", FULL_LOGITS)
def test_a_head_that_cannot_be_cut_out_runs_with_full_logits_and_says_so_once(reason, caplog):
    model, inputs = FULL_LOGITS[reason](tiny_llama()), batch()
    torch.manual_seed(1)
    loss, full = step(model, inputs)
    with caplog.at_level(logging.WARNING):
        attached = attach_chunked_loss(model, chunk_tokens=7)
        for _ in range(2):
            torch.manual_seed(1)
            chunked_loss, chunked = step(model, inputs)
    assert torch.equal(chunked_loss, loss)
    assert all(torch.equal(chunked[name], gradient) for name, gradient in full.items())
    assert attached.report()["mode"] == "full logits"
    assert reason in attached.report()["reason"]
    assert [reason in record.message for record in caplog.records] == [True]
    attached.undo()


def test_a_model_without_a_head_is_left_alone_and_says_so(caplog):
    model = tiny_llama().model
    attached = attach_chunked_loss(model)
    assert attached.report()["mode"] == "full logits"
    assert "no module with an output head and a labels argument was found" in caplog.text
    attached.undo()


def test_logits_read_outside_autocast_are_those_of_the_forward():
    model, inputs = tiny_llama(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs).logits
        attach_chunked_loss(model)
        logits = model(**inputs).logits
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits + 0, expected)


def test_compiled_models_run_with_full_logits_in_one_graph():
    model, inputs = tiny_llama(), batch()
    _, full = step(model, inputs)
    attached = attach_chunked_loss(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        model.zero_grad()
        compiled(**inputs).loss.backward()
    assert counter.frame_count == 1
    assert largest_error({name: p.grad for name, p in model.named_parameters()}, full) <= 1e-6
    assert attached.report()["reason"] == "torch.compile traced the model"
    torch._dynamo.reset()


def test_chunks_chosen_by_shape_serve_the_gemms_and_grow_with_the_hidden_states():
    from ckpt.engine.loss_chunks import auto_chunk_tokens

    assert auto_chunk_tokens(T, 32, 97) == 512
    assert auto_chunk_tokens(8192, 256, 32_000) == 512
    assert auto_chunk_tokens(8192, 640, 262_144) == 512
    assert auto_chunk_tokens(8192, 4096, 128_256) == 1024
    assert auto_chunk_tokens(131_072, 4096, 128_256) == 2048  # 1 GiB of fp32 logits, as one hidden state in bf16
