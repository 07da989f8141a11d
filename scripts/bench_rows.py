"""The benchmark's rows: what each side does to a model, the peers' policies first and then ours.

A peer's policy is imported from its installed package where it is there (`make bench` installs them without what they
depend on, as their pins contradict each other); where it is not, the row runs our statement of the policy and says so.
All that a row needs is on the model that `Row.prepare` is given, a fresh one each time: nothing is undone.

    row = rows(losses="same")["trl"]; step = row.prepare(case.model()); loss = step(*case.batch())
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import ckpt
from ckpt.layers import find_layers

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One way to train.

    side: "library", "peer" or "ours". what: one line for the table. put: puts it in force on a model; None: `strategy`
    by `ckpt.apply`. source: package and version that the policy was imported from, or "our statement". budget_of: for
    auto, the row whose measured peak, times budget_share, is the budget. loss: "full" (logits, the library's),
    "chunked" (ours) or "trl" (TRL's fused head); best_loss: the same where each side chooses its own.
    """

    name: str
    side: str
    what: str
    put: Callable[[nn.Module], None] | None = None
    strategy: Any = None
    tile_mlp: int = 1
    loss: str = "chunked"
    best_loss: str = "chunked"
    source: str = ""
    budget_of: str | None = None
    budget_share: float = 1.0

    def prepare(self, model: nn.Module, strategy: Any = None, compile: Any = False) -> Step:
        """Put the row in force on a fresh model; return its step: tokens, labels (1, T) -> loss, and gradients.

        strategy: the plan, for auto. compile: as `ckpt.apply` takes it, for our strategies.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        if self.loss == "trl":
            from trl.trainer.utils import add_fused_lm_head

            add_fused_lm_head(model)
            arguments["fused_lm_head"] = True
        chosen = strategy or self.strategy or "none"
        if self.put is None or self.loss == "chunked":
            ckpt.apply(model, chosen, loss=self.loss, tile_mlp=self.tile_mlp, compile=compile)
        if self.put is not None:
            self.put(model)

        def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=labels, **arguments).loss
            loss.backward()
            return loss.detach()

        return step


def rows(losses: str = "same") -> dict[str, Row]:
    """List all rows by name. losses: "same" gives all the chunked loss, "best" each side its own best."""
    made = [*_library(), *_peers(), *_ours()]
    made += _auto([row for row in made if row.side != "ours"])
    if losses == "best":
        made = [replace(row, loss=row.best_loss) for row in made]
    return {row.name: row for row in made}


# -- the library and the peers ----------------------------------------------------------------------------------------


def _library() -> list[Row]:
    version = _version("transformers")

    def every(n: int) -> Callable[[nn.Module], None]:
        return lambda model: model.activation_checkpointing_enable(every_n_layers=n)

    return [
        Row("none", "library", "everything kept", put=lambda model: None, best_loss="full", source=version),
        *(
            Row(f"library {n}", "library", f"`activation_checkpointing_enable(every_n_layers={n})`", put=every(n),
                best_loss="full", source=version)
            for n in (1, 2, 4)
        ),
    ]  # fmt: skip


def _peers() -> list[Row]:
    return [
        _peer("trl", "TRL: attention kept", "trl", _trl, lambda model: _wrap(model, _attention_kept), "trl"),
        _peer("torchtitan", "torchtitan: every second matmul kept", "torchtitan", _torchtitan,
              lambda model: _wrap(model, _every_second(with_attention=False))),
        Row("torchtitan + attention", "peer", "torchtitan's policy with the CPU's attention op in its list",
            put=lambda model: _wrap(model, _every_second()), best_loss="full", source="our statement"),
        _peer("nemo", "NeMo AutoModel: every second matmul and attention kept", "nemo_automodel", _nemo,
              lambda model: _wrap(model, _every_second())),
    ]  # fmt: skip


def _peer(
    name: str, what: str, package: str, imported: Callable, stated: Callable[[nn.Module], None], loss: str = "full"
) -> Row:
    """Make a peer's row from its package, or from our statement where that is not installed. Imports at use."""
    if found := _version(package):
        return Row(name, "peer", what, put=lambda model: imported()(model), best_loss=loss, source=found)
    return Row(name, "peer", what, put=stated, best_loss="full", source="our statement")


def _trl() -> Callable[[nn.Module], None]:
    from trl.models import enable_selective_activation_checkpointing

    def put(model: nn.Module) -> None:
        enable_selective_activation_checkpointing(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers has renamed what TRL wraps
            model.gradient_checkpointing_enable()

    return put


def _torchtitan() -> Callable[[nn.Module], None]:
    """SelectiveAC as it stands. Its list of ops lacks the CPU's attention op, which it therefore replays here."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    policy = SelectiveAC(SelectiveAC.Config())

    def put(model: nn.Module) -> None:
        for layer in find_layers(model):
            _replace(model, layer.name, policy._wrap_block(layer.module))

    return put


def _nemo() -> Callable[[nn.Module], None]:
    from nemo_automodel.components.distributed import activation_checkpointing as nemo

    logging.getLogger(nemo.__name__).setLevel(logging.ERROR)

    def put(model: nn.Module) -> None:
        nemo.apply_selective_checkpointing_to_layers(model, [layer.module for layer in find_layers(model)], False)

    return put


# -- our statement of their policies, for where a package is not installed ---------------------------------------------

_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


def _attention_kept() -> Callable:
    """TRL (models/selective_activation_checkpointing.py): keep fused attention, replay the rest."""

    def policy(ctx, op, *args, **kwargs):
        kept = getattr(op, "overloadpacket", op) in {getattr(torch.ops.aten, name) for name in _ATTENTION}
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _every_second(with_attention: bool = True) -> Callable[[], Callable]:
    """torchtitan (distributed/activation_checkpoint.py), NeMo AutoModel: keep the first, third, ... matmul of a layer,
    attention, and what else the partitioner calls compute-intensive."""
    from torch._functorch.partitioners import get_default_op_list

    kept = {op.default for op in get_default_op_list().compute_intensive_ops} | {torch.ops.aten.topk.default}
    kept |= {getattr(torch.ops.aten, name).default for name in _ATTENTION if with_attention or "cpu" not in name}

    def make() -> Callable:
        counts = {False: 0, True: 0}

        def policy(ctx, op, *args, **kwargs):
            if op is torch.ops.aten.mm.default:
                counts[ctx.is_recompute] += 1
                if counts[ctx.is_recompute] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        return policy

    return make


def _wrap(model: nn.Module, make_policy: Callable[[], Callable]) -> None:
    for layer in find_layers(model):
        wrapped = checkpoint_wrapper(
            layer.module, context_fn=lambda: create_selective_checkpoint_contexts(make_policy())
        )
        _replace(model, layer.name, wrapped)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    holder, _, key = name.rpartition(".")
    model.get_submodule(holder)._modules[key] = module


# -- ours -------------------------------------------------------------------------------------------------------------


def _ours() -> list[Row]:
    version = "this repository"
    strategies = [
        ("full", "`full`", ckpt.Full(), 1),
        ("full tiled", "`full`, `tile_mlp=8`", ckpt.Full(), 8),
        ("segments", "`segments` (2, replay)", ckpt.Segments(2, "replay"), 1),
        ("selective", "`selective` (attention)", ckpt.Selective("attention"), 1),
        ("selective matmul", "`selective` (attention+matmul)", ckpt.Selective("attention+matmul"), 1),
        ("offload disk", "`offload` (disk)", ckpt.Offload(target="disk"), 1),
    ]
    return [Row(n, "ours", what, strategy=s, tile_mlp=t, source=version) for n, what, s, t in strategies]


def _auto(peers: list[Row]) -> list[Row]:
    made = [
        Row(f"auto @ {peer.name}", "ours", f"`auto` at the peak of {peer.name}", budget_of=peer.name,
            source="this repository")
        for peer in peers
    ]  # fmt: skip
    tiled = Row("auto tiled", "ours", "`auto`, `tile_mlp=8`, at 0.12x the peak of library 1", tile_mlp=8,
                budget_of="library 1", budget_share=0.12, source="this repository")  # fmt: skip
    return [*made, tiled]


def _version(package: str) -> str:
    """Return "package version" of what is installed, empty if it is not."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package.replace('_', '-'))}"
    return ""
