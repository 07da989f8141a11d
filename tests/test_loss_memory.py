"""The memory of head and loss follows the chunk, not the batch; and is the same on fake tensors."""

import pytest
import torch
from test_loss import tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt.engine.lazy_logits import LazyLogits
from ckpt.engine.loss import attach_chunked_loss
from ckpt.ledger import measure

V, T = 1009, 512
"""A vocabulary that is no other size of the model, so that a logits tensor is known by its shape."""


class LargestLogits(TorchDispatchMode):
    """Rows of the largest tensor that has a vocabulary axis, weights apart."""

    def __init__(self, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and V in tensor.shape and self.hidden_size not in tensor.shape:
                self.rows = max(self.rows, tensor.numel() // V)
        return result


def tokens_with_labels(labelled=T):
    tokens = torch.randint(0, V, (1, T))
    labels = torch.full_like(tokens, -100)
    labels[:, T - labelled :] = tokens[:, T - labelled :]
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def largest_logits(model, inputs):
    with LargestLogits(model.config.hidden_size) as found:
        model(**inputs).loss.backward()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_of_a_step_has_more_logits_than_a_chunk(dtype):
    model = tiny_llama(V).to(dtype)
    assert largest_logits(model, tokens_with_labels()).rows >= T - 1  # the check sees full logits
    attach_chunked_loss(model, chunk_tokens=64)
    assert largest_logits(model, tokens_with_labels()).rows == 64


def test_only_labelled_positions_are_computed():
    model = tiny_llama(V)
    attach_chunked_loss(model, chunk_tokens=64)
    assert largest_logits(model, tokens_with_labels(labelled=16)).rows == 16
    assert largest_logits(model, tokens_with_labels(labelled=100)).rows == 64


def test_evaluation_has_no_more_logits_than_a_chunk():
    model = tiny_llama(V).eval()
    attach_chunked_loss(model, chunk_tokens=64)
    with torch.no_grad(), LargestLogits(model.config.hidden_size) as found:
        outputs = model(**tokens_with_labels())
        outputs.logits.argmax(-1)
    assert found.rows == 64


def peak_of_step(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        with measure(model, optimizer, inputs=inputs) as ledger:
            outputs = model(**inputs)
            outputs.loss.backward()
            optimizer.step()
        if attached := isinstance(outputs.logits, LazyLogits):
            assert outputs.logits.state.real is None
        del outputs
    return ledger.peak_bytes, attached


def test_the_measured_peak_follows_the_chunk():
    model, inputs = tiny_llama(V, num_hidden_layers=1), tokens_with_labels()
    full, _ = peak_of_step(model, inputs)
    peaks = {}
    for chunk_tokens in (64, 128, 256):
        attached = attach_chunked_loss(model, chunk_tokens=chunk_tokens)
        peaks[chunk_tokens], _ = peak_of_step(model, inputs)
        attached.undo()
    # One fp32 buffer of logits, twice: itself, and what the softmax makes of it a block at a time.
    assert peaks[128] - peaks[64] == pytest.approx(64 * V * 4, rel=0.1)
    assert peaks[256] - peaks[128] == pytest.approx(128 * V * 4, rel=0.1)
    assert full - peaks[64] > 2 * (T - 64) * V * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True])
def test_fake_tensors_have_the_same_peak(dtype, frozen):
    def peak():
        torch.set_default_dtype(dtype)  # fake models cannot be cast
        model = tiny_llama(V, num_hidden_layers=0)
        model.model.config._attn_implementation = (
            "flash_attention_2"  # no mask: transformers builds one on fake tensors
        )
        torch.set_default_dtype(torch.float32)
        model.lm_head.requires_grad_(not frozen)
        attach_chunked_loss(model, chunk_tokens=64)
        inputs = tokens_with_labels()
        return peak_of_step(model, {**inputs, "labels": inputs["input_ids"]})

    real = peak()
    with FakeTensorMode():
        fake = peak()
    assert fake == real


def test_a_gradient_buffer_of_the_head_is_the_gradient():
    # fp32: what the chunks add into becomes parameter.grad, with no second (V, D) tensor at any time.
    model, inputs = tiny_llama(V, num_hidden_layers=0), tokens_with_labels()
    attach_chunked_loss(model, chunk_tokens=64)

    class HeadSized(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in tree_leaves(result):
                new = isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known
                HeadSized.made += new and tensor.numel() == V * model.config.hidden_size
            return result

    outputs = model(**inputs)
    before = HeadSized.made
    with HeadSized():
        model(**inputs)
    assert HeadSized.made - before == 1
    with HeadSized():
        outputs.loss.backward()
    assert HeadSized.made - before == 2  # and the embedding's
