"""What a real step would fail at is refused by a prediction too, in one line; and nothing of the user's is touched."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, RobertaConfig

import ckpt
from ckpt.fake import Unpredictable
from ckpt.longest import longest_that_fits
from ckpt.positions import learned_positions
from ckpt.predict import predict

WORK = ckpt.Workload(seq_len=16, dtype="fp32", loss="full", optimizer="sgd")
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=48, bos_token_id=0, eos_token_id=0)


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_rows_beyond_a_table_of_positions_are_refused():
    with pytest.raises(ValueError, match="seq_len=49 is beyond the 48 positions of GPT2LMHeadModel"):
        predict(GPT2, "full", WORK.replace(seq_len=49))
    assert predict(GPT2, "full", WORK.replace(seq_len=48)).peak_bytes
    assert predict(LLAMA, "full", WORK).peak_bytes  # rotary positions end nowhere


def test_the_longest_sequence_ends_with_the_table_of_positions():
    found = longest_that_fits(GPT2, "full", WORK, budget_bytes=2**40)
    assert found.seq_len == 48 and found.is_capped


def test_positions_are_those_that_real_forwards_take():
    roberta = RobertaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=20, is_decoder=True,
    )  # fmt: skip
    for config in (GPT2, roberta):
        model = AutoModelForCausalLM.from_config(config)
        most = learned_positions(model)
        model(torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError), match="out of range|out of bounds"):
            model(torch.full((1, most + 1), 5))


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_a_model_of_frozen_parameters_is_refused(optimizer):
    model = on_meta(LLAMA).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of this LlamaForCausalLM is trained"):
        predict(model, "full", WORK.replace(optimizer=optimizer))


def test_optimizers_that_a_step_cannot_run_are_refused():
    with pytest.raises(ValueError, match="LBFGS asks for a closure in step"):
        predict(LLAMA, "full", WORK.replace(optimizer=torch.optim.LBFGS))
    with pytest.raises(ValueError, match="optimizer is a SGD that has its parameters already"):
        WORK.replace(optimizer=torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize("budget", ["80GiB", True, -1, float("nan"), [1]])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget):
    with pytest.raises(ValueError, match="must be bytes, a number from 0 on"):
        longest_that_fits(LLAMA, "full", WORK, budget_bytes=budget)


@pytest.mark.parametrize("mesh", [{"tensor": 3}, {"sequence": 3}], ids=str)
def test_degrees_that_do_not_divide_leave_no_process_group_behind(mesh):
    with pytest.raises(ValueError, match=f"{min(mesh)}=3"):
        predict(LLAMA, "full", WORK.replace(mesh=mesh))
    assert not dist.is_initialized()


@pytest.mark.parametrize("optimizer", ["adamw8bit", "sgd"])
def test_optimizers_over_a_mesh_hold_a_rank_s_share(optimizer):
    config = LlamaConfig(**LLAMA.to_diff_dict() | {"vocab_size": 1024, "intermediate_size": 256})
    alone, spread = (
        predict(config, "full", WORK.replace(mesh=mesh, optimizer=optimizer)).residents for mesh in (None, {"shard": 4})
    )
    assert spread["parameters"] * 4 == pytest.approx(alone["parameters"], rel=0.001)  # buffers are whole
    qmap = 2 * 256 * 4  # of 8-bit states, once a process
    least = max(0, alone["optimizer_state"] - qmap) / 4
    assert least <= spread["optimizer_state"] <= least * 1.01 + qmap


def test_adafactor_over_a_mesh_is_refused():
    with pytest.raises(ValueError, match="adafactor' cannot update sharded parameters"):
        predict(LLAMA, "full", WORK.replace(mesh={"shard": 2}, optimizer="adafactor"))


def test_a_mesh_of_sharded_and_split_parameters_is_predicted():
    alone, spread = (predict(LLAMA, "full", WORK.replace(mesh=mesh)) for mesh in (None, {"shard": 2, "tensor": 2}))
    assert 0 < spread.residents["parameters"] < alone.residents["parameters"] / 2


def test_a_function_that_keeps_the_original_s_weights_is_refused_and_gives_them_no_gradient():
    model = AutoModelForCausalLM.from_config(LLAMA)
    mlp = model.model.layers[0].mlp
    whole = mlp.forward
    mlp.forward = lambda x: whole(x).exp()
    with pytest.raises(Unpredictable, match="keeps a parameter of shape"):
        predict(model, "none", WORK)
    assert all(p.grad is None for p in model.parameters())
