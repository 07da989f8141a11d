"""The model and its tokenizer from the config: where weights come from, positions, adapters, export."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from recipes.config import Model, Peft, RopeScaling
from recipes.model import add_adapter, build_model, build_tokenizer, describe, export, load_config

SHAPE = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SMALL = Model(name="small", init="random", tokenizer="byte", config={"model_type": "llama", **SHAPE})


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def change(**values):
    return dataclasses.replace(SMALL, **values)


def make(chosen=SMALL, seq_len=64, seed=0, **options):
    torch.manual_seed(seed)
    return build_model(chosen, load_config(chosen, seq_len), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SHAPE, use_cache=True)).to(torch.bfloat16).save_pretrained(path)
    build_tokenizer(SMALL, load_config(SMALL, 64)).save_pretrained(path)
    return path


def test_random_weights_depend_on_the_seed_alone():
    a, b, c = make(seed=1), make(seed=1), make(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert a.training and a.dtype == torch.float32


def test_written_out_config_needs_no_hub_whatever_the_name_says():
    assert make(change(name="some-owner/no-such-model")).config.hidden_size == 32


def test_folder_is_loaded_in_the_dtype_that_it_was_saved_in(folder):
    chosen = Model(name=str(folder))
    model = build_model(chosen, load_config(chosen, 64))
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.training
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), saved.parameters(), strict=True))
    assert len(build_tokenizer(chosen, model.config)) == 384


def altered(folder, path, **fields):
    """Copy a saved model with another config.json; return its name."""
    shutil.copytree(folder, path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return Model(name=str(path))


def test_what_model_config_says_beside_weights_is_changed(folder):
    changed = Model(name=str(folder), config={"attention_dropout": 0.25, "rope_parameters": {"rope_theta": 5.0}})
    model = build_model(changed, load_config(changed, 64))
    assert model.config.attention_dropout == 0.25 and model.config.rope_parameters["rope_theta"] == 5.0
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    with pytest.raises(ValueError, match="model.config.atention_dropout is no field of a llama config"):
        load_config(Model(name=str(folder), config={"atention_dropout": 0.25}), 64)


def test_a_whole_config_beside_weights_must_have_their_shape(folder):
    assert load_config(Model(name=str(folder), config=SMALL.config), 64).num_hidden_layers == 2
    with pytest.raises(ValueError, match="model.config.num_hidden_layers=1, and the weights of .* were made with 2"):
        load_config(Model(name=str(folder), config=SMALL.config | {"num_hidden_layers": 1}), 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 3, "layer_types": None}, r"no weights for 9 parameters of its shape \(model.layers.2"),
        ({"attention_bias": True}, r"has no weights for 8 parameters"),
        ({"intermediate_size": 96}, "cannot be loaded: .*mismatched"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(folder, tmp_path, fields, message):
    chosen = altered(folder, tmp_path / "model", **fields)
    with pytest.raises(ValueError, match=message) as caught:
        build_model(chosen, load_config(chosen, 64))
    assert "\n" not in str(caught.value)


def test_weights_cut_short_are_one_line(folder, tmp_path):
    chosen = altered(folder, tmp_path / "model")
    with open(tmp_path / "model/model.safetensors", "r+b") as file:
        file.truncate(4000)
    with pytest.raises(ValueError, match="cannot be loaded: .*The folder must hold"):
        build_model(chosen, load_config(chosen, 64))


def test_a_folder_that_is_no_model_but_shows_what_was_meant(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded.*an adapter alone: give the model"):
        load_config(Model(name=str(tmp_path)), 64)
    (tmp_path / "run/export").mkdir(parents=True)
    (tmp_path / "run/export/config.json").write_text("{}")
    with pytest.raises(ValueError, match="It is a run, whose model is in .*/run/export"):
        load_config(Model(name=str(tmp_path / "run")), 64)


def test_folder_with_init_random_takes_its_shape_alone(folder):
    chosen = Model(name=str(folder), init="random")
    model = make(chosen, seed=1)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.hidden_size == 32
    assert not torch.equal(model.lm_head.weight.bfloat16(), saved.lm_head.weight)
    assert make(dataclasses.replace(chosen, config={"num_hidden_layers": 1})).config.num_hidden_layers == 1


def test_meta_device_gives_shapes_and_loads_nothing(folder):
    chosen = Model(name=str(folder))
    model = build_model(chosen, load_config(chosen, 64), device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "some-owner/no-such-model",
            r"^model some-owner/no-such-model cannot be loaded: .*hf download.* model.init=random",
        ),
        ("/no/such/folder", r"^model.name=/no/such/folder is no folder"),
        ("package:no_such_package/model", r"needs the Python package no_such_package, which is not installed"),
    ],
)
def test_model_out_of_reach_is_one_line_that_says_what_to_do(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(Model(name=name), 64)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_folder_without_a_model_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be loaded.*config.json") as caught:
        load_config(Model(name=str(tmp_path)), 64)
    assert "\n" not in str(caught.value)


def test_tokenizer_out_of_reach_is_one_line():
    with pytest.raises(ValueError, match=r"^tokenizer of small cannot be loaded: .*model.tokenizer=byte") as caught:
        build_tokenizer(change(tokenizer="auto"), load_config(SMALL, 64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"model_type": "lama"},
            "model_type='lama' is no architecture of the installed Transformers. Did you mean 'llama'",
        ),
        ({}, "tokenizer|cannot be loaded"),
        ({"hidden_size": 8}, "model_type=None is no architecture"),
        ({"model_type": "t5"}, "T5Config, which is no causal language model"),
        ({"model_type": "llama", "hidden_size": "wide"}, "no valid llama config: .*hidden_size.*'wide'"),
    ],
)
def test_config_that_is_no_model_is_refused(config, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(change(config=config, name="no-such-model"), 64)
    assert "\n" not in str(caught.value)


def test_tokenizer_larger_than_the_embeddings_is_refused():
    with pytest.raises(ValueError, match="384 tokens, the model 100 embeddings"):
        build_tokenizer(SMALL, LlamaConfig(vocab_size=100))


def test_code_of_a_repository_runs_only_when_asked_for(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemError('executed')")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_config(Model(name=str(tmp_path)), 64)
    with pytest.raises(SystemError, match="executed"):
        load_config(Model(name=str(tmp_path), trust_remote_code=True), 64)


def test_context_beyond_the_positions_is_refused_with_the_factor_needed():
    with pytest.raises(ValueError, match="seq_len=1000 is beyond the 256 positions.*rope_scaling.factor=4"):
        load_config(SMALL, 1000)
    assert load_config(SMALL, 256).max_position_embeddings == 256


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_rope_scaling_stretches_positions_and_changes_frequencies(kind):
    chosen = change(rope_scaling=RopeScaling(kind, 4.0))
    model = make(chosen, seq_len=1024)
    assert model.config.max_position_embeddings == 1024
    assert model.config.rope_parameters["rope_type"] == kind
    plain = make().model.rotary_emb.inv_freq
    scaled = model.model.rotary_emb.inv_freq
    assert not torch.equal(scaled, plain)
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    assert model(torch.zeros(1, 1024, dtype=torch.long), use_cache=False).logits.isfinite().all()
    with pytest.raises(ValueError, match="seq_len=1025 is beyond the 1024 positions.*factor=5"):
        load_config(chosen, 1025)


def test_rope_scaling_of_a_family_with_windows_stretches_full_attention_alone():
    shape = SHAPE | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    chosen = change(config={"model_type": "gemma3_text", **shape}, rope_scaling=RopeScaling("linear", 2.0))
    rope = load_config(chosen, 512).rope_parameters
    assert rope["full_attention"]["rope_type"] == "linear" and rope["full_attention"]["factor"] == 2.0
    assert rope["sliding_attention"]["rope_type"] == "default"
    make(chosen, seq_len=512)


def test_rope_scaling_where_it_cannot_be_is_refused():
    learned = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 384}
    with pytest.raises(ValueError, match="needs rotary positions, which model small does not"):
        load_config(change(config=learned, rope_scaling=RopeScaling("yarn", 2.0)), 512)
    with pytest.raises(ValueError, match="beyond the 256 positions of model small. Lower seq_len: they are learned"):
        load_config(change(config=learned), 512)
    scaled = SMALL.config | {
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    }
    with pytest.raises(ValueError, match=r"stretches its positions already \(linear\)"):
        load_config(change(config=scaled, rope_scaling=RopeScaling("yarn", 2.0)), 1024)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "camembert"])
def test_an_encoder_is_refused_unless_it_is_made_a_decoder(kind):
    config = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"} | {"model_type": kind}
    with pytest.raises(ValueError, match="is an encoder: .*model.config.is_decoder=true"):
        make(change(config=config), device="meta")
    make(change(config=config | {"is_decoder": True}), device="meta")
    make(change(config=config | {"model_type": "gpt_neox"}), device="meta")


def test_lora_trains_adapters_alone_and_saves_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    model = add_adapter(make(), Peft(name="lora", rank=2, targets=["q_proj", "down_proj"]))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    ids = torch.arange(12)[None]
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)
    export(model, build_tokenizer(SMALL, model.config), tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_lora_targets_that_match_nothing_are_refused():
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=r"peft.targets=\['nope'\] does not fit this model"):
        add_adapter(make(), Peft(name="lora", targets=["nope"]))


def test_no_adapter_leaves_the_model_as_it_is():
    model = make()
    assert add_adapter(model, Peft()) is model


def test_export_loads_in_plain_transformers_with_equal_logits(tmp_path):
    model = make()
    export(model, build_tokenizer(SMALL, model.config), tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(12)[None]
    assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    assert loaded.config.use_cache is True
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("abc").input_ids
        == build_tokenizer(SMALL, model.config)("abc").input_ids
    )


def test_description_names_parameters_and_how_many_are_trained():
    model = make()
    total = sum(p.numel() for p in model.parameters()) / 1e6
    assert describe(model, SMALL) == f"model small: LlamaForCausalLM, {total:,.2f} M parameters, random weights"
    model.model.requires_grad_(False)
    assert describe(model, SMALL).endswith("0.01 M of them trained")


def test_config_class_of_gpt2_is_not_written_to():
    """`load_config` builds a config of its own each time: two models never share one."""
    assert load_config(SMALL, 64) is not load_config(SMALL, 64)
    assert isinstance(load_config(change(config={"model_type": "gpt2", "n_positions": 64}), 64), GPT2Config)
