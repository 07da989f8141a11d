"""The chunked loss under FSDP2, two gloo ranks: the head in the root's group, apart, or grouped with the norm."""

import datetime
import gc
import os

import pytest
import torch
import torch.distributed as dist
from test_loss import batch, largest_error, step, tiny_llama

pytestmark = pytest.mark.dist

WAYS = {
    "head in the root's group": lambda model: [],
    "head apart": lambda model: [model.lm_head],
    "head and norm together": lambda model: [[model.model.norm, model.lm_head]],
}


def check_all_ways(rank: int, port: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ckpt.engine.loss import attach_chunked_loss

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    inputs = batch()
    mine = {key: value[rank : rank + 1] if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    for tied in (False, True):
        for way, groups in WAYS.items():
            if tied and way != "head in the root's group":
                continue  # FSDP2 itself cannot shard a tied head apart from the embedding
            model = tiny_llama(tie_word_embeddings=tied)
            expected = model(**mine).logits.detach()
            _, full = step(model, inputs)
            model.zero_grad(set_to_none=True)
            attached = attach_chunked_loss(model, chunk_tokens=7)
            for group in [*model.model.layers, *groups(model), model]:
                fully_shard(group, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            outputs = model(**mine)
            assert attached.report()["reason"] == "1 loss in chunks of 7 tokens", (way, attached.report())
            assert torch.equal(outputs.logits + 0, expected), way
            (outputs.loss + 0.0 * outputs.logits.mean()).backward()
            found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
            assert largest_error(found, full) <= 1e-6, way
            unread = model(**mine)
            unread.loss.backward()
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"have changed since the forward|FSDP has freed"):
                unread.logits.sum()
    # Two-rank processes abort at exit unless all this is gone before the group is.
    del model, outputs, unread, optimizer, attached, found, mesh
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def test_gradients_under_fsdp_equal_one_process_with_full_logits():
    torch.multiprocessing.spawn(check_all_ways, (free_port(),), nprocs=2)


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
