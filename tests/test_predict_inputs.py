"""Peaks and FLOPs of inputs whose values decide about masks, and of offload to the host, are those of a real step."""

import copy

import pytest
import torch

import ckpt
from ckpt.fake_step import train_step
from ckpt.precision import prepare
from ckpt.predict import predict
from scripts.predict_table import build

WORK = ckpt.Workload(batch_size=2, seq_len=96, dtype="fp32", loss="full", optimizer=None)
IDS = torch.randint(0, 1000, (2, 96), generator=torch.Generator().manual_seed(0))


def real_step(model, strategy, batch):
    """Peak and host bytes of the second step, FLOPs of the third."""
    model = copy.deepcopy(model)
    precision = prepare(model, "fp32")
    if strategy is not None:
        ckpt.apply(model, strategy)
    train_step(model, [batch], None, precision)
    with ckpt.measure(model, inputs=batch) as ledger:
        train_step(model, [batch], None, precision)
    with ckpt.FlopCounter() as counter:
        train_step(model, [batch], None, precision)
    return ledger.peak_bytes, ledger.host_bytes, counter.total


def masked(num_left_out):
    mask = torch.ones(2, 96, dtype=torch.long)
    mask[:, :num_left_out] = 0
    return {"attention_mask": mask}


GIVEN = {
    "padded": masked(20),
    "a mask of ones": masked(0),
    "positions that restart": {"position_ids": (torch.arange(96) % 32).expand(2, 96)},
    "positions in order": {"position_ids": torch.arange(96).expand(2, 96)},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_masks_are_made_as_the_values_that_are_given_say(given):
    model, batch = build("llama"), {"input_ids": IDS, "labels": IDS, **given}
    peak, _, flops = real_step(model, "full", batch)
    predicted = predict(model, "full", WORK, inputs=batch)
    assert predicted.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert predicted.step_flops == flops


@pytest.mark.parametrize(
    "strategy", [ckpt.Offload(), ckpt.Offload(what="kept", keep="attention+matmul")], ids=["inputs", "kept"]
)
def test_bytes_on_the_host_are_no_part_of_the_peak(strategy):
    model, batch = build("llama"), {"input_ids": IDS, "labels": IDS}
    peak, host, flops = real_step(model, strategy, batch)
    predicted = predict(model, strategy, WORK, inputs=batch)
    assert predicted.peak_bytes == pytest.approx(peak, rel=1e-3)
    assert predicted.host_bytes == host > 0
    assert predicted.step_flops == flops
