"""Every key of `train.py` and `plan.py`: name, type, default, one line of doc, and the rules between keys.

YAML files under conf/ hold only what differs from these defaults. Knows no Hydra, and torch only
by way of `ckpt.strategies`, asked last, so that most mistakes are reported before anything heavy is imported.

    cfg = from_dict({"seq_len": 512, "strategy": {"name": "every_n", "n": 2}})
    cfg.seq_len, cfg.strategy.name, cfg.strategy.fields       # 512, "every_n", {"n": 2}
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

from recipes.resuming import named
from recipes.schema import build, key, section

ATTENTIONS = ("auto", "flash", "sdpa", "eager", "flash_attention_2", "flash_attention_3")
_FILE_NAME = re.compile(r"[\w][\w.=,+-]*")


@dataclass(frozen=True)
class RopeScaling:
    """Stretch rotary positions so that a model runs beyond the context it was trained for."""

    type: Literal["none", "linear", "yarn"] = key("none", "how positions are stretched")
    factor: float = key(1.0, "new context divided by the model's own", at_least=1)


@dataclass(frozen=True)
class Model:
    """What is trained."""

    name: str | None = key(
        None, "hub ID or folder of a model, package:NAME of an installed one, or a label beside `config`"
    )
    init: Literal["pretrained", "random"] = key("pretrained", "real weights, or random ones from the config alone")
    config: dict[str, Any] = key(
        {}, "architecture for init=random, as in config.json; empty: read from `name`; beside weights: what to change"
    )
    tokenizer: str = key("auto", "auto: the model's own; byte: one token a byte, no file; or hub ID or folder")
    gguf_file: str | None = key(None, "GGUF file with the weights, inside `name`")
    revision: str | None = key(None, "branch, tag or commit on the hub")
    rope_scaling: RopeScaling = section(RopeScaling, "contexts beyond the model's own")
    trust_remote_code: bool = key(False, "run Python code that a hub repository brings along")


@dataclass(frozen=True)
class Data:
    """On which text."""

    source: Literal["stdlib", "text", "hub", "chat"] = key("stdlib", "where documents come from")
    path: str | list[str] | None = key(None, "text, chat: files, folders or globs")
    name: str | None = key(None, "hub: ID of the data set")
    subset: str | None = key(None, "hub: configuration of the data set")
    split: str = key("train", "hub: split to train on")
    column: str = key("text", "hub, jsonl, parquet: column that holds the text")
    max_documents: int | None = key(None, "use only the first so many documents", at_least=1)
    eval_fraction: float = key(0.02, "share of the documents held out for evaluation", at_least=0, below=1)
    packing: Literal["isolate", "concat", "none"] = key(
        "isolate", "documents share rows unseen by each other, seen, or not at all"
    )
    shuffle: bool = key(True, "visit documents in a random order, new each epoch")
    streaming: bool = key(False, "read as it goes, for data larger than memory")
    augment: Literal["none", "crop", "mask"] = key("none", "random change of each training document, new each epoch")


@dataclass(frozen=True)
class Optim:
    """How weights move."""

    lr: float = key(3e-4, "peak learning rate", above=0)
    schedule: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = key("cosine", "learning rate over time")
    warmup: float = key(0.05, "steps of linear warm-up; below 1: as a share of `steps`", at_least=0)
    weight_decay: float = key(0.1, "decoupled weight decay, on matrices only", at_least=0)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's averaging factors", at_least=0, below=1)
    eps: float = key(1e-8, "AdamW's epsilon", above=0)
    clip: float = key(1.0, "largest global gradient norm; 0: no clipping", at_least=0)


@dataclass(frozen=True)
class Peft:
    """Parameter-efficient fine-tuning."""

    name: Literal["none", "lora"] = key("none", "parameter-efficient method")
    rank: int = key(16, "LoRA rank", at_least=1)
    alpha: float = key(32.0, "LoRA scale, divided by the rank", above=0)
    dropout: float = key(0.0, "dropout in front of the adapters", at_least=0, below=1)
    targets: str | list[str] = key("all-linear", "modules that get an adapter, as in peft")


@dataclass(frozen=True)
class Parallel:
    """Degrees of the device mesh; -1 takes the ranks that the others leave."""

    replicate: int = key(1, "data parallel with whole copies", at_least=-1)
    shard: int = key(-1, "data parallel with parameters, gradients and optimizer state sharded", at_least=-1)
    tensor: int = key(1, "tensor parallel", at_least=-1)
    sequence: int = key(1, "sequence parallel (Ulysses)", at_least=-1)
    reshard: bool = key(True, "free a layer's gathered parameters after its forward; false: hold them for backward")
    link: Literal["auto", "nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5", "400g"] = key(
        "auto", "predictions: link between the ranks of a node; auto: the device's own; between nodes 400g each"
    )
    node_ranks: int = key(8, "predictions: ranks that share a node", at_least=1)
    timeout_seconds: int = key(600, "how long a rank waits for the others before it gives up", at_least=1)


@dataclass(frozen=True)
class Eval:
    """Loss on documents held out."""

    every: int = key(0, "steps between evaluations; 0: only at the end", at_least=0)
    batches: int = key(8, "batches of one evaluation; 0: never evaluate", at_least=0)


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases."""

    project: str = key("activation-checkpointing", "W&B project")
    entity: str | None = key(None, "W&B user or team; null: the key's default")
    group: str | None = key(None, "group of the run; a sweep sets it")
    mode: Literal["auto", "online", "offline"] = key("auto", "auto: online with an API key, offline without")


@dataclass(frozen=True)
class Hardware:
    """Device that predictions are for."""

    name: Literal[
        "auto", "measure", "cpu", "a100_40", "a100_80", "h100", "h200", "l40s", "rtx4090", "rtx5090"
    ] = key("auto", "auto: the device in use; measure: the same, its speed calibrated by a few kernels")
    memory_gib: float | None = key(None, "memory that a step may take, in GiB; null: what the device has", above=0)


@dataclass(frozen=True)
class Sweep:
    """Multirun (-m)."""

    name: str | None = key(None, "folder of a sweep under runs_dir; null: from its start time")
    resume: bool = key(False, "skip the jobs of the named sweep that already ended ok")
    ranks: int = key(1, "ranks that each job is started with, on this machine by torchrun", at_least=1)
    job_memory_gib: float | None = key(None, "memory that a job may allocate; more is an oom", above=0)
    job_timeout_minutes: float | None = key(None, "a job that takes longer is stopped: timeout", above=0)


@dataclass(frozen=True)
class Search:
    """The longest sequence (scripts/max_context.py)."""

    step: int = key(1024, "lengths are multiples of so many tokens", at_least=2)
    most: int = key(2**24, "no longer than this", at_least=2)
    host_budget_gib: float | None = key(None, "host memory for what is offloaded; null: any amount", above=0)
    confirm: Literal["auto", "yes", "no"] = key("auto", "run real steps; auto: where the device asked for is at hand")


@dataclass(frozen=True)
class Strategy:
    """The chosen strategy and its own fields (`ckpt.strategies.make(name, **fields)`)."""

    name: str = key("none", "selected with +strategy=NAME")
    fields: dict[str, Any] = key({}, "on the command line and in files: strategy.FIELD")


@dataclass(frozen=True)
class Config:
    """Everything; nested groups at the end."""

    recipe: Literal["pretrain", "finetune"] = key("pretrain", "program of recipes/ to run")
    name: str | None = key(None, "run directory under runs_dir; null: strategy-model-seq_len-start time")
    runs_dir: str = key("runs", "folder of all runs")
    plans_dir: str = key("plans", "folder of what plan.py writes")
    resume: bool | str = key(False, "continue a run from its train state: its folder (or true, beside `name`)")
    steps: int = key(100, "optimizer steps", at_least=1)
    seq_len: int = key(1024, "tokens in a row", at_least=2)
    batch_size: int | Literal["auto"] = key(
        2, "rows in one forward and backward, on each rank; auto: the fastest within strategy.budget_gib", at_least=1
    )
    grad_accum: int = key(1, "micro-batches in an optimizer step", at_least=1)
    seed: int = key(0, "seed of weights, data order and dropout", at_least=0, at_most=2**63 - 1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one")
    deterministic: bool = key(False, "only deterministic kernels, slower on a GPU")
    dtype: Literal["fp32", "bf16", "bf16_pure"] = key("fp32", "bf16: fp32 master weights, bf16 compute")
    loss: Literal["chunked", "full"] = key("chunked", "chunked: never a (tokens, vocabulary) tensor; full: as it is")
    tile_mlp: int | Literal["auto"] = key(1, "tiles that the MLP is replayed in", at_least=1)
    attn: str = key("auto", "attention: auto, flash, sdpa, eager, flash_attention_2, flash_attention_3, kernels:ID")
    compile: bool = key(False, "torch.compile the decoder layers")
    log_every: int = key(1, "steps between lines of metrics.jsonl", at_least=1)
    measure_every: int = key(0, "steps between probe steps of the memory ledger; 0: one, after warm-up", at_least=0)
    profile: bool = key(False, "torch.profiler trace of one step after warm-up, trace.json.gz in the run's directory")
    save_every: int = key(0, "steps between train states; 0: only at the end; -1: never", at_least=-1)
    save_async: bool = key(False, "train on while a train state is written, from a copy of it in host memory")
    export: bool = key(False, "write the trained model with save_pretrained, to export/ in the run's directory")
    tracker: Literal["wandb", "none"] = key("wandb", "where metrics go besides metrics.jsonl")
    on_predicted_oom: Literal["warn", "error"] = key(
        "warn", "when the predicted peak exceeds the device; error: the run ends before step 1, status predicted_oom"
    )
    output: Literal["table", "json"] = key("table", "how results are printed")
    debug: bool = key(False, "show the traceback of an error")
    model: Model = section(Model, "what is trained")
    data: Data = section(Data, "on which text")
    strategy: Strategy = dataclasses.field(default_factory=Strategy)
    optim: Optim = section(Optim, "how weights move")
    peft: Peft = section(Peft, "parameter-efficient fine-tuning")
    parallel: Parallel = section(Parallel, "over which ranks")
    eval: Eval = section(Eval, "held-out loss")
    hardware: Hardware = section(Hardware, "device that predictions are for")
    wandb: Wandb = section(Wandb, "Weights & Biases")
    sweep: Sweep = section(Sweep, "multirun (-m)")
    search: Search = section(Search, "the longest sequence (scripts/max_context.py)")


def from_dict(values: dict[str, Any]) -> Config:
    """Make the checked Config of a nested dict. Raises ValueError, in one line, for the first mistake."""
    values = named(values)
    strategy = values.pop("strategy", {"name": "none"})
    cfg = build(Config, values)
    check(cfg)
    return dataclasses.replace(cfg, strategy=_strategy(strategy))


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the nested dict that `from_dict` takes back: plain types only, strategy fields flat beside its name."""
    values = dataclasses.asdict(cfg)
    values["strategy"] = {"name": cfg.strategy.name, **cfg.strategy.fields}
    values["optim"]["betas"] = list(cfg.optim.betas)
    return values


def check(cfg: Config) -> None:
    """Check the rules between keys. Raises ValueError for the first one broken."""
    if cfg.name is not None and not _FILE_NAME.fullmatch(cfg.name):
        raise ValueError(f"name={cfg.name!r} is no folder name: use letters, digits and - _ . = , + only.")
    if cfg.sweep.name is not None and not _FILE_NAME.fullmatch(cfg.sweep.name):
        raise ValueError(f"sweep.name={cfg.sweep.name!r} is no folder name: use letters, digits and - _ . = , + only.")
    if cfg.batch_size == "auto" and cfg.resume:
        raise ValueError("batch_size=auto chooses before the first step: resume with the numbers of the run's summary.")
    if cfg.resume and cfg.name is None:
        raise ValueError("resume=true needs the run to continue: resume=runs/NAME, or name=... beside it.")
    if cfg.model.name is None and not cfg.model.config:
        raise ValueError("model=hub needs the model: model.name=ID_OR_FOLDER.")
    if cfg.attn not in ATTENTIONS and not cfg.attn.startswith("kernels:"):
        raise ValueError(f"attn={cfg.attn!r} is unknown. Choose {', '.join(ATTENTIONS)} or kernels:ID.")
    if cfg.model.rope_scaling.type == "none" and cfg.model.rope_scaling.factor != 1:
        raise ValueError(
            f"model.rope_scaling.factor={cfg.model.rope_scaling.factor:g} needs model.rope_scaling.type=yarn or linear."
        )
    needs = {"text": "path", "chat": "path", "hub": "name"}.get(cfg.data.source)
    if needs and not getattr(cfg.data, needs):
        raise ValueError(f"data={cfg.data.source} needs data.{needs}=...")
    if cfg.optim.warmup >= 1 and cfg.optim.warmup > cfg.steps:
        raise ValueError(
            f"optim.warmup={cfg.optim.warmup:g} is more than steps={cfg.steps}. Give fewer, or a share below 1."
        )
    degrees = parallel_degrees(cfg)
    for name, degree in degrees.items():
        if degree == 0:
            raise ValueError(
                f"parallel.{name}=0 is no degree: give 1 or more, or -1 for the ranks that the others leave."
            )
    if list(degrees.values()).count(-1) > 1:
        asked = next(name for name, degree in degrees.items() if degree == -1 and name != "shard")
        raise ValueError(
            f"parallel: only one degree can be -1, the ranks that the others leave. Beside parallel.{asked}=-1 set "
            "parallel.shard=1, which is -1 unless given."
        )


def parallel_degrees(cfg: Config) -> dict[str, int]:
    """Return the degrees of the device mesh by name; -1 stands for the ranks that the others leave."""
    return {name: getattr(cfg.parallel, name) for name in ("replicate", "shard", "tensor", "sequence")}


def check_ranks(cfg: Config, num_ranks: int) -> None:
    """Check the degrees against the number of ranks. Raises ValueError."""
    degrees = parallel_degrees(cfg)
    if num_ranks == 1:
        for name, degree in degrees.items():
            if degree > 1:
                raise ValueError(
                    f"parallel.{name}={degree} needs {degree} ranks, and there is one. Start them with "
                    f"scripts/launch/torchrun.sh, or leave parallel.{name} out."
                )
    elif cfg.seq_len % (sequence := degrees["sequence"]) and sequence > 1:
        raise ValueError(
            f"seq_len={cfg.seq_len} cannot be divided over parallel.sequence={sequence}. Choose a multiple of it."
        )


def _strategy(node: Any) -> Strategy:
    """Check the strategy against `ckpt.strategies`, which owns names, fields and their values (and imports torch)."""
    from ckpt import strategies

    node = {"name": node} if isinstance(node, str) else node
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        raise ValueError(f"strategy={node!r} has no name. Choose {', '.join(strategies.STRATEGIES)}: +strategy=NAME.")
    name = node["name"]
    fields = {field: value for field, value in node.items() if field != "name"}
    own = {known: [f.name for f in dataclasses.fields(cls)] for known, cls in strategies.STRATEGIES.items()}
    for field in fields:
        if name in own and field not in own[name]:
            owners = [known for known in own if field in own[known]]
            belongs = f" It belongs to {' and '.join(owners)}." if owners else _near(field, own[name])
            allowed = ", ".join(f"strategy.{known}" for known in own[name]) or "no fields"
            raise ValueError(f"strategy.{field} is no field of strategy {name}, which has {allowed}.{belongs}")
    strategies.make(name, **fields)
    return Strategy(name, fields)


def _near(field: str, own: list[str]) -> str:
    near = difflib.get_close_matches(field, own, n=1)
    return f" Did you mean strategy.{near[0]}?" if near else ""
