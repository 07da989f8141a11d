"""Lazy logits: what leaves them lazy, what makes them real, and that neither changes a value or a gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt.engine.lazy_logits import LazyLogits, lazy, real
from ckpt.engine.lazy_state import Stats
from ckpt.engine.loss_call import HeadCall

B, T, D, V = 2, 5, 4, 11


def lazy_pair(dtype=torch.float32, chunk_tokens=3):
    """Lazy logits and the eager ones of the same head, each with hidden states of its own."""
    torch.manual_seed(0)
    head = nn.Linear(D, V).to(dtype)
    hidden = torch.randn(B, T, D, dtype=dtype)
    mine, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    made = lazy(HeadCall.capture(head, mine, head.forward), mine, Stats(chunk_tokens))
    return made, head(theirs), mine, theirs


STAY_LAZY = {
    "token slice": lambda x: x[..., :-1, :],
    "token slice, all axes": lambda x: x[:, 1:, :],
    "row": lambda x: x[0],
    "new axis": lambda x: x[None],
    "mask of tokens": lambda x: x[torch.arange(B * T).view(B, T) % 3 == 0],
    "index of tokens": lambda x: x[:, torch.tensor([3, 1])],
    "vocabulary slice": lambda x: x[..., : V - 2],
    "vocabulary and token slice": lambda x: x[:, 1:, 2:5],
    "flat": lambda x: x.view(-1, V),
    "reshaped": lambda x: x[:, 1:].reshape(-1, V),
    "reshaped by tuple": lambda x: x.reshape((T, B, V)),
    "flattened": lambda x: x.flatten(0, 1),
    "contiguous": lambda x: x[..., :-1, :].contiguous(),
    "split": lambda x: x.view(-1, V).split(4)[1],
    "chunk": lambda x: torch.chunk(x, 2, dim=1)[1],
    "clone": lambda x: x.clone(),
    "to bf16": lambda x: x.to(torch.bfloat16),
    "to fp64": lambda x: x.double(),
    "to the same": lambda x: x.to(x.dtype).float(),
    "scaled": lambda x: x * 0.5,
    "scaled from the left": lambda x: 3 * x,
    "divided": lambda x: x / 7.0,
    "divided by a tensor": lambda x: torch.div(x, torch.tensor(3.0)),
    "soft cap": lambda x: torch.tanh(x / 5) * 5,
    "constant minus": lambda x: 1 - x,
    "bias of the vocabulary": lambda x: x + torch.linspace(0, 1, V)[None],
    "constant on the left": lambda x: torch.add(torch.ones(1, V), x),
    "scaled in place": lambda x: x.mul_(0.5).div_(3),
}
BECOME_REAL = {
    "softmax": lambda x: x.softmax(-1),
    "log-sum-exp of a function": lambda x: torch.logsumexp(x * 2, -1),
    "two of them": lambda x: x + x,
    "a tensor of other shape": lambda x: x * torch.arange(T).view(T, 1),
    "a trained constant": lambda x: x * nn.Parameter(torch.tensor(2.0)),
    "one column": lambda x: x[..., 3],
    "columns by index": lambda x: x[:, :, torch.tensor([1, 2])],
    "transposed": lambda x: x.transpose(1, 2),
    "through view": lambda x: x.view(B, T * V),
    "mean": lambda x: x.mean(),
    "T": lambda x: x.mT,
    "list of them": lambda x: torch.stack([x, x]),
    "written": lambda x: x.masked_fill_(torch.arange(V) == 2, -5.0) * 1.0,
}


@pytest.mark.parametrize("name", STAY_LAZY)
def test_stays_lazy_with_equal_values_and_gradients(name):
    made, eager, mine, theirs = lazy_pair()
    result, expected = STAY_LAZY[name](made), STAY_LAZY[name](eager)
    assert isinstance(result, LazyLogits)
    assert made.state.stats.made_real_by == []
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(real(result, "test"), expected)
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", BECOME_REAL)
def test_becomes_real_with_equal_values_and_gradients(name):
    made, eager, mine, theirs = lazy_pair()
    result, expected = BECOME_REAL[name](made), BECOME_REAL[name](eager)
    assert type(result) is torch.Tensor
    assert len(made.state.stats.made_real_by) == 1
    assert torch.equal(result, expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_questions_about_shape_and_place_compute_nothing():
    made, eager, _, _ = lazy_pair()
    for ask in (
        lambda x: x.shape, lambda x: x.size(-1), lambda x: x.dim(), lambda x: x.numel(), lambda x: x.dtype, len,
        lambda x: x.device, lambda x: x.requires_grad, lambda x: x.is_contiguous(), lambda x: x.is_floating_point(),
        lambda x: x.is_cuda, lambda x: x.stride(), lambda x: x.element_size(), lambda x: x.is_leaf, lambda x: x.nbytes,
    ):  # fmt: skip
        assert ask(made) == ask(eager)
    assert made.state.stats.made_real_by == []


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("labelled", ["all", "most", "few", "none"])
def test_cross_entropy_means_what_torch_means(reduction, smoothing, labelled):
    made, eager, mine, theirs = lazy_pair()
    target = torch.randint(0, V, (B * T,))
    target[{"all": slice(0), "most": slice(1), "few": slice(8), "none": slice(None)}[labelled]] = 5
    arguments = {"ignore_index": 5, "reduction": reduction, "label_smoothing": smoothing}
    loss = F.cross_entropy(made.view(-1, V), target, **arguments)
    expected = F.cross_entropy(eager.view(-1, V), target, **arguments)
    assert made.state.stats.num_chunked == 1
    loss.backward()
    expected.backward()
    if labelled == "none":
        assert loss == 0
        assert torch.equal(mine.grad, torch.zeros_like(mine))
    else:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "arguments",
    [{"reduction": "none"}, {"weight": torch.arange(1.0, V + 1)}, {"target": torch.full((B * T, V), 1 / V)}],
    ids=["no reduction", "class weights", "class probabilities"],
)
def test_other_cross_entropies_use_real_logits(arguments):
    made, eager, mine, theirs = lazy_pair()
    arguments = {"target": torch.randint(0, V, (B * T,)), **arguments}
    result, expected = (F.cross_entropy(logits.view(-1, V), **arguments) for logits in (made, eager))
    assert torch.equal(result, expected)
    assert made.state.stats.num_chunked == 0
    result.sum().backward()
    expected.sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_predictions_are_computed_in_chunks():
    made, eager, _, _ = lazy_pair()
    assert torch.equal(made.argmax(-1), eager.argmax(-1))
    assert torch.equal(torch.argmax(made, dim=2, keepdim=True), eager.argmax(-1, keepdim=True))
    assert made.state.stats.made_real_by == []


def test_a_custom_autograd_function_gets_its_gradient():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C.DisableTorchFunctionSubclass():  # as C++ code does
                ctx.save_for_backward(x * 1)
                return (x * x).sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 * ctx.saved_tensors[0]

    made, eager, mine, theirs = lazy_pair()
    loss, expected = Square.apply(made / 2), Square.apply(eager / 2)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_values_made_without_gradients_do_not_stand_for_the_graph():
    made, eager, mine, theirs = lazy_pair()
    with torch.no_grad():
        assert torch.equal(made + made, eager + eager)
    made.exp().sum().backward()
    eager.exp().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_a_write_is_seen_by_all_later_uses():
    made, eager, mine, theirs = lazy_pair()
    for logits in (made, eager):
        logits[:, :, 2] = -3.0
    loss, expected = (F.cross_entropy(logits.view(-1, V), torch.zeros(B * T, dtype=int)) for logits in (made, eager))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_a_write_that_a_view_would_miss_is_refused():
    made, _, _, _ = lazy_pair()
    view = made[:, 1:]
    with pytest.raises(RuntimeError, match="Write before slicing"):
        made[:, :, 2] = -3.0
    with pytest.raises(RuntimeError, match="Write before slicing"):
        view.mul_(2)


def test_logits_read_after_the_weights_moved_are_refused():
    made, _, _, _ = lazy_pair()
    with torch.no_grad():
        made.state.call.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="have changed since the forward"):
        made.sum()


def test_a_hook_on_logits_that_have_no_gradient_is_refused():
    made, _, _, _ = lazy_pair()
    with pytest.raises(RuntimeError, match="has no gradient with respect to its logits"):
        made.register_hook(print)
    with pytest.raises(RuntimeError, match="has no gradient with respect to its logits"):
        made.retain_grad()


def test_detached_logits_carry_no_gradient():
    made, eager, _, _ = lazy_pair()
    for detached in (made.detach(), made.data):
        assert isinstance(detached, LazyLogits)
        assert not detached.requires_grad
        assert not (detached * 2).exp().requires_grad
        assert torch.equal(detached.exp(), eager.exp())


def test_a_constant_that_changes_later_is_noticed():
    made, _, _, _ = lazy_pair()
    bias = torch.ones(V)
    shifted = made + bias
    bias.zero_()
    with pytest.raises(RuntimeError, match="have changed since the forward"):
        shifted.sum()
