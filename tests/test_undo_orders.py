"""Orders of calls that users come upon: undo before backward, a plan before a step, a bad keep-list, pickled models."""

import copy
import io

import pytest
import torch
import zoo

import ckpt


@pytest.fixture
def model():
    torch.manual_seed(0)
    return zoo.build("llama")


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("strategy", [ckpt.Offload(), ckpt.Offload(target="disk"), ckpt.Full(), ckpt.Segments(2)])
def test_backward_may_follow_undo(model, strategy):
    batch = zoo.batch(model, 16)
    expected = gradients(model, model(**batch).loss)
    handle = ckpt.apply(model, strategy)
    loss = model(**batch).loss
    handle.undo()
    assert all(map(torch.equal, gradients(model, loss), expected))


def test_a_keep_list_that_matches_nothing_leaves_the_model_as_it_was(model):
    ckpt.apply(model, ckpt.Selective(keep="nosuchop"))
    with pytest.raises(ValueError, match="matched no op"):
        model(**zoo.batch(model, 16))
    assert ckpt.applied_to(model) is None
    ckpt.apply(model, "full").undo()


def test_a_plan_before_any_step_is_refused(model):
    handle = ckpt.apply(model, "selective")
    with pytest.raises(ValueError, match="after a step"):
        handle.plan()
    handle.undo()


@pytest.mark.parametrize("copied", ["pickle", "deepcopy"])
def test_a_tiled_model_survives_copying(model, copied):
    batch = zoo.batch(model, 16)
    handle = ckpt.apply(model, "full", tile_mlp=2)
    expected = gradients(model, model(**batch).loss)
    if copied == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    handle.undo()
    assert all(map(torch.equal, gradients(other, other(**batch).loss), expected))


@pytest.mark.parametrize(
    "given", [{"model": None, "strategy": "full"}, {"strategy": "selective", "dynamic": "nothing.*"}]
)
def test_wrong_arguments_are_named(model, given):
    with pytest.raises(ValueError, match=r"must be a torch module|nothing\.\*"):
        ckpt.apply(**{"model": model, **given})


def test_a_keep_list_is_text():
    with pytest.raises(ValueError, match="must be text"):
        ckpt.Selective(keep=["attention"])
