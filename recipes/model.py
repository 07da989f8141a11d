"""The model and its tokenizer, from `model.*`; the adapter, from `peft.*`.

Owns what is made of the config, the check of the context against the model's positions, and LoRA. Where files come from
is `recipes.hub`'s. Knows no strategy.

    config = load_config(cfg.model, cfg.seq_len)
    model = build_model(cfg.model, config, device="cuda")     # device="meta": shapes alone
    tokenizer = build_tokenizer(cfg.model, config)
    model = add_adapter(model, cfg.peft)                      # before ckpt.apply
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.byt5 import ByT5Tokenizer

from recipes.config import Model, Peft, RopeScaling
from recipes.distributed import ONE, Ranks
from recipes.hub import PACKAGE, first_line, from_where, no_bars_off_terminals, reach

# Differ from the weights' own only where somebody changed them.
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def load_config(chosen: Model, seq_len: int) -> PreTrainedConfig:
    """Return the Transformers config: of written-out values for `init=random`, else read from folder or hub.

    What `model.config` says beside pretrained weights, or of a folder's shape without its model_type, is changed there.
    Raises ValueError for an unknown architecture, one that is no causal language model, a model that cannot be reached,
    and a `seq_len` beyond its positions.
    """
    is_change = "model_type" not in chosen.config and bool(chosen.name) and Path(chosen.name).expanduser().is_dir()
    if chosen.init == "random" and chosen.config and not is_change:
        config = _written_out(dict(chosen.config))
    else:
        config = reach(chosen, lambda name: AutoConfig.from_pretrained(name, **from_where(chosen)))
        _change(config, chosen.config, _label(chosen))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not _brings_own_class(chosen, config):
        raise ValueError(
            f"model {_label(chosen)} is a {type(config).__name__}, which is no causal language model. "
            "Give one that predicts the next token."
        )
    _stretch_positions(_text(config), chosen.rope_scaling, seq_len, _label(chosen))
    return config


def build_model(chosen: Model, config: PreTrainedConfig, device: torch.device | str = "cpu") -> nn.Module:
    """Make the model on `device`, in training mode: random fp32 weights, or real ones in the dtype they are stored in.

    Random weights depend on torch's generator alone. On the meta device nothing is loaded, whatever `init` says.
    """
    device = torch.device(device)
    if chosen.init == "random" or device.type == "meta":
        with device:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=chosen.trust_remote_code
            )
    else:
        options: dict[str, Any] = {"dtype": "auto", "output_loading_info": True}
        if chosen.gguf_file:  # without dequantize=True, save_pretrained raises afterwards (transformers 5.24)
            options |= {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        model, loaded = reach(
            chosen,
            lambda name: AutoModelForCausalLM.from_pretrained(name, config=config, **from_where(chosen), **options),
        )
        _refuse_missing(loaded["missing_keys"], _label(chosen))
        model = model.to(device)
    _refuse_encoder(model, _label(chosen))
    return model.train()


def build_tokenizer(chosen: Model, config: PreTrainedConfig) -> Any:
    """Return the tokenizer: bytes (ByT5's, no file), the model's own, or another by name.

    Raises ValueError when it cannot be reached or has more tokens than the model has embeddings.
    """
    if chosen.tokenizer == "byte":
        tokenizer = ByT5Tokenizer()
    elif chosen.tokenizer == "auto":
        tokenizer = _reach_tokenizer(chosen, "tokenizer of ")
    else:
        other = Model(name=chosen.tokenizer, trust_remote_code=chosen.trust_remote_code)
        tokenizer = _reach_tokenizer(other, "tokenizer ")
    num_embeddings = _text(config).vocab_size
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {num_embeddings} embeddings. Choose a "
            "tokenizer that fits (model.tokenizer), or a larger vocab_size in model.config."
        )
    return tokenizer


def add_adapter(model: nn.Module, peft: Peft) -> nn.Module:
    """Freeze the model and give it trainable low-rank adapters, for `peft.name=lora`; else return it as it is.

    Raises ValueError when peft is not installed or no module matches `peft.targets`.
    """
    if peft.name == "none":
        return model
    if importlib.util.find_spec("peft") is None:
        raise ValueError("peft.name=lora needs the package peft: pip install 'activation-checkpointing[lora]'.")
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(
        r=peft.rank,
        lora_alpha=peft.alpha,
        lora_dropout=peft.dropout,
        target_modules=peft.targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads a property that transformers 5.24 calls by another name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            return get_peft_model(model, adapter).train()
    except ValueError as error:
        raise ValueError(f"peft.targets={peft.targets!r} does not fit this model: {first_line(error)}") from error


def export(model: nn.Module, tokenizer: Any, folder: Path, ranks: Ranks = ONE) -> None:
    """Write what plain Transformers (or, of an adapter, peft) loads with `from_pretrained(folder)`, however the model
    is spread over ranks."""
    state = {} if ranks.layout is None else {"state_dict": gathered_state(model, ranks)}
    if ranks.is_main:
        with no_bars_off_terminals():
            model.save_pretrained(folder, **state)
        tokenizer.save_pretrained(folder)
    ranks.gather(None)  # nobody leaves before the files are there


def gathered_state(model: nn.Module, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the whole state dict, in host memory on rank 0, empty on the others. One tensor at a time is gathered."""
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.is_main:
            found[name] = whole.detach().cpu()
    return found


def describe(model: nn.Module, chosen: Model) -> str:
    """Say in one line what is trained."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = "random weights" if chosen.init == "random" else "pretrained"
    partly = "" if trained == total else f", {trained / 1e6:,.2f} M of them trained"
    return f"model {_label(chosen)}: {type(model).__name__}, {total / 1e6:,.2f} M parameters, {weights}{partly}"


def _refuse_missing(names: Iterable[str], label: str) -> None:
    """Refuse weights that are not all there: Transformers would draw the rest at random, and go on."""
    if missing := sorted(names):
        raise ValueError(
            f"model {label} has no weights for {len(missing)} parameters of its shape ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}). Give a model whose config.json fits its weights, or train its "
            "shape alone: model.init=random."
        )


def _refuse_encoder(model: nn.Module, label: str) -> None:
    """Refuse BERT and its like as they are: each token sees the one that it is to predict."""
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if getattr(model.config, "is_decoder", True) is False and causal and not any(causal):
        raise ValueError(
            f"model {label} is an encoder: its attention sees later tokens, those to be predicted among them. Make it "
            "causal with model.config.is_decoder=true, or give another model."
        )


def _change(config: PreTrainedConfig, values: dict[str, Any], label: str, where: str = "model.config") -> None:
    """Put `model.config` into the config of pretrained weights: dropout, say.

    Where it is a whole written-out one (it names its model_type), which describes a hub's model to who cannot reach it,
    nothing is changed; raises ValueError where it is another shape than that of the weights, or for an unknown field.
    """
    is_whole = "model_type" in values
    for name, value in values.items():
        path = f"{where}.{name}"
        if is_whole:
            if name in _SIZES and getattr(config, name, value) != value:
                raise ValueError(
                    f"{path}={value}, and the weights of model {label} were made with {getattr(config, name)}. Leave "
                    "it out, or train the shape alone: model.init=random."
                )
        elif not hasattr(config, name):
            raise ValueError(f"{path} is no field of a {config.model_type} config. Leave it out.")
        elif isinstance(value, dict) and isinstance(getattr(config, name), PreTrainedConfig):
            _change(getattr(config, name), value, label, path)
        else:
            before = getattr(config, name)
            setattr(config, name, before | value if isinstance(before, dict) and isinstance(value, dict) else value)


def _written_out(values: dict[str, Any]) -> PreTrainedConfig:
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        raise ValueError(
            f"model.config.model_type={model_type!r} is no architecture of the installed Transformers. "
            f"Did you mean {near[0]!r}?"
            if near
            else f"model.config.model_type={model_type!r} is no architecture of the installed Transformers."
        )
    try:
        config = CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # each config class, and huggingface_hub's validation, has its own kinds
        raise ValueError(f"model.config is no valid {model_type} config: {first_line(error)}") from error
    _refuse_unknown_fields(config, values, model_type)
    return config


def _refuse_unknown_fields(config: PreTrainedConfig, values: dict[str, Any], model_type: str) -> None:
    """Refuse a name that the class does not know: it would be stuck onto the config and looked at by nobody."""
    declared = {field.name for field in dataclasses.fields(config)}
    for name in values:
        # A name of old is turned into a new one on the way, and no attribute is left of it.
        if name not in declared and name in vars(config) and not name.startswith("_"):
            near = difflib.get_close_matches(name, declared | set(config.attribute_map), n=1)
            did_you_mean = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"model.config.{name} is no field of a {model_type} config.{did_you_mean} Leave it out.")


def _reach_tokenizer(chosen: Model, what: str) -> Any:
    return reach(chosen, lambda name: AutoTokenizer.from_pretrained(name, **from_where(chosen)), what)


def _brings_own_class(chosen: Model, config: PreTrainedConfig) -> bool:
    return chosen.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})


def _stretch_positions(config: PreTrainedConfig, scaling: RopeScaling, seq_len: int, label: str) -> None:
    """Check `seq_len` against the model's positions; with `rope_scaling`, write it into the config first.

    YaRN: Peng et al. 2023, arXiv:2309.00071. Linear: Chen et al. 2023, arXiv:2306.15595.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if scaling.type != "none":
        positions = _scale_rope(config, scaling, positions, label)
    if positions is not None and seq_len > positions:
        needed = -(-seq_len // (positions / (scaling.factor if scaling.type != "none" else 1)))
        stretch = f", or stretch them: model.rope_scaling.type=yarn model.rope_scaling.factor={needed:.0f}"
        raise ValueError(
            f"seq_len={seq_len} is beyond the {positions} positions of model {label}. Lower seq_len"
            + (stretch if getattr(config, "rope_parameters", None) else ": they are learned, and cannot be stretched.")
        )


def _scale_rope(config: PreTrainedConfig, scaling: RopeScaling, positions: int | None, label: str) -> int:
    rope = getattr(config, "rope_parameters", None)
    if not rope or positions is None:
        raise ValueError(
            f"model.rope_scaling.type={scaling.type} needs rotary positions, which model {label} does not "
            "have. Lower seq_len and leave rope_scaling out."
        )
    # Families with windows keep one rotary base a kind of layer; only the layers that see everything are stretched.
    layers = rope.get("full_attention", rope)
    if layers.get("rope_type", "default") != "default":
        raise ValueError(
            f"model {label} stretches its positions already ({layers['rope_type']}). Leave "
            "model.rope_scaling out, and keep seq_len within its "
            f"{positions} positions."
        )
    layers |= {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type == "yarn":
        layers["original_max_position_embeddings"] = positions
    config.max_position_embeddings = int(positions * scaling.factor)
    return config.max_position_embeddings


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model inside a composite one."""
    return config.get_text_config(decoder=True)


def _label(chosen: Model) -> str:
    return chosen.name.removeprefix(PACKAGE)
