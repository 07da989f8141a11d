"""Every key is declared once; every file under conf/ composes; a mistake is one line that names the key and the fix."""

import dataclasses
import re

import hydra
import pytest
import yaml

from ckpt import strategies
from recipes.cli import CONF, GROUPS, compose, normalise, options, register_defaults
from recipes.config import Config, from_dict, to_dict
from recipes.schema import docs

# What a file of a group cannot be composed without, because only the user knows it.
NEEDS = {
    "data/text": ["data.path=notes"],
    "data/chat": ["data.path=chat.jsonl"],
    "data/hub": ["data.name=some/data"],
    "model/hub": ["model.name=some/model"],
    "strategy/plan": ["strategy.path=plan.json"],
    "strategy/auto": ["strategy.budget_gib=70"],
}
FILES = sorted(str(path.relative_to(CONF).with_suffix("")) for path in CONF.glob("*/*.yaml"))


def published(parameters):
    """Round to the precision in which model cards give parameter counts."""
    return f"{parameters / 1e9:.2f}"


@pytest.mark.parametrize("file", FILES)
def test_every_config_file_composes(file):
    group, name = file.split("/")
    cfg = compose([f"{group}={name}", *NEEDS.get(file, [])])
    if group == "strategy":
        assert cfg.strategy.name == name
    if group in ("data", "peft", "hardware"):
        assert {"data": cfg.data.source, "peft": cfg.peft.name, "hardware": cfg.hardware.name}[group] == name


def test_the_glob_sees_every_group():
    assert {file.split("/")[0] for file in FILES} == {*GROUPS, "strategy"}
    assert set(FILES) >= {"model/llama3_8b", "data/stdlib", "strategy/selective", "recipe/pretrain", "hardware/auto"}


def test_there_is_a_file_for_every_strategy():
    assert set(options("strategy")) == set(strategies.STRATEGIES)


@pytest.mark.parametrize("name", options("strategy"))
def test_strategy_file_gives_every_field_its_default(name):
    node = yaml.safe_load((CONF / "strategy" / f"{name}.yaml").read_text())
    expected = {f.name: f.default for f in dataclasses.fields(strategies.STRATEGIES[name])}
    assert {key: value or expected[key] for key, value in node.items() if key != "name"} == expected


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_file_says_what_it_is(file):
    lines = file.read_text().splitlines()
    assert next(line for line in lines if not line.startswith("# @package")).startswith("# ")


@pytest.mark.parametrize("file", sorted((CONF / "recipe").glob("*_*.yaml")), ids=lambda path: path.stem)
def test_recipe_header_gives_use_cost_result_and_command_and_selects_no_strategy(file):
    text = file.read_text()
    for entry in ("# When: ", "# Hardware: ", "# Cost: ", "# Expected: ", "# Command: "):
        assert entry in text
    command = re.search(r"# Command: +(.+)", text)[1]
    assert f"recipe={file.stem}" in command and "+strategy=" in command
    assert "strategy" not in (yaml.safe_load(text) or {})
    assert not any("strategy" in str(entry) for entry in yaml.safe_load(text).get("defaults", []))


@pytest.mark.parametrize(
    "recipe", sorted(path.stem for path in (CONF / "recipe").glob("*_*.yaml") if not path.stem.endswith("_cpu"))
)
def test_recipe_has_a_cpu_twin_of_the_same_kind(recipe):
    big, twin = compose([f"recipe={recipe}"]), compose([f"recipe={recipe}_cpu"])
    assert (big.recipe, big.dtype, big.loss, big.peft, big.optim, big.tile_mlp) == (
        twin.recipe,
        twin.dtype,
        twin.loss,
        twin.peft,
        twin.optim,
        twin.tile_mlp,
    )
    assert twin.model.name == "small" and twin.seq_len < big.seq_len


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama3_8b", "8.03"),
        ("llama3_1b", "1.24"),
        ("qwen3_8b", "8.19"),
        ("qwen3_0_6b", "0.60"),
        ("mistral_7b", "7.25"),
        ("gemma3_4b", "3.88"),
        ("mixtral_8x7b", "46.70"),
        ("gpt_oss_20b", "20.91"),
    ],
)
def test_architecture_written_out_has_the_published_number_of_parameters(model, billions):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(compose([f"model={model}", "model.init=random"]).model.config)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    assert published(built.num_parameters()) == billions


@pytest.mark.parametrize("spelling", ["+strategy=full", "strategy=full", "++strategy=full"])
def test_every_spelling_selects_the_strategy(spelling):
    assert compose([spelling]).strategy.name == "full"


def test_no_strategy_at_all_means_none():
    assert compose().strategy.name == "none" and compose().strategy.fields == {}


@pytest.mark.parametrize("group", GROUPS)
def test_other_groups_take_a_plus_too(group):
    choice = {"model": "llama3_1b", "data": "stdlib", "peft": "lora", "hardware": "auto", "recipe": "finetune"}[group]
    assert compose([f"+{group}={choice}"]) == compose([f"{group}={choice}"])


def test_each_job_of_a_multirun_composes():
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    register_defaults()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        words = normalise(["strategy=none,full", "seq_len=256,512", "strategy.n=3"][:2])
        parsed = OverridesParser.create().parse_overrides(words)
        jobs = BasicSweeper.split_arguments(parsed, None)[0]
    found = [(cfg.strategy.name, cfg.seq_len) for cfg in (compose(job) for job in jobs)]
    assert found == [("none", 256), ("none", 512), ("full", 256), ("full", 512)]


def test_fields_of_the_chosen_strategy_reach_it():
    assert compose(["+strategy=every_n", "strategy.n=3"]).strategy.fields == {"n": 3}
    assert compose(["+strategy=segments", "strategy.size=4", "strategy.inner=replay"]).strategy.fields == {
        "size": 4,
        "inner": "replay",
    }


def test_a_keep_list_is_joined_by_plus():
    assert (
        compose(["+strategy=selective", "strategy.keep=attention+matmul"]).strategy.fields["keep"] == "attention+matmul"
    )


def test_every_strategy_of_the_config_is_made_by_the_library():
    for name in options("strategy"):
        strategy = compose([f"+strategy={name}", *NEEDS.get(f"strategy/{name}", [])]).strategy
        assert strategies.make(strategy.name, **strategy.fields).name == name


def test_config_survives_its_own_file():
    cfg = compose(["+strategy=segments", "optim.betas=[0.8,0.9]", "data=text", "data.path=[a,b]", "peft=lora"])
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(cfg)))) == cfg


def test_every_key_has_type_default_and_one_line_of_doc():
    rows = docs(Config)
    assert len(rows) > 60
    for path, type_, _, doc in rows:
        assert doc and "\n" not in doc and type_, path


def test_the_defaults_of_the_design_hold():
    cfg = compose()
    assert (cfg.data.packing, cfg.loss, cfg.tracker, cfg.runs_dir) == ("isolate", "chunked", "wandb", "runs")
    assert cfg.model.trust_remote_code is False and cfg.attn == "auto"


MISTAKES = [
    # what is written, what the message must hold
    (["seqlen=512"], ["seqlen is no key", "Did you mean seq_len?"]),
    (["+seqlen=512"], ["seqlen is no key", "Did you mean seq_len?"]),
    (["++optim.rl=1"], ["optim.rl is no key", "Did you mean optim.lr?", "optim.schedule"]),
    (["+optim.extra.deep=1"], ["optim.extra is no key"]),
    (["+foo.bar=1"], ["foo is no key"]),
    (["+strategy=foo"], ["strategy=foo is unknown", "every_n, full, none"]),
    (["strategy=selectiv"], ["Did you mean selective?"]),
    (["+strategy=full", "strategy.n=3"], ["strategy.n is no field of strategy full", "belongs to every_n"]),
    (["+strategy=full", "+strategy.n=3"], ["strategy.n is no field of strategy full"]),
    (["strategy.n=3"], ["strategy.n is no field of strategy none"]),
    (["+strategy=every_n", "strategy.m=3"], ["strategy.m is no field of strategy every_n", "strategy.n"]),
    (["+strategy=segments", "strategy.sizes=3"], ["Did you mean strategy.size?"]),
    (["+strategy=every_n", "strategy.n=0"], ["n=0"]),
    (["+strategy=every_n", "strategy.n=-1"], ["n=-1"]),
    (["+strategy=every_n", "strategy.n=2.5"], ["n=2.5"]),
    (["+strategy=every_n", "strategy.n=true"], ["n=True"]),
    (["+strategy=every_n", "strategy.n=two"], ["n='two'"]),
    (["+strategy=segments", "strategy.size=0"], ["size=0"]),
    (["+strategy=segments", "strategy.inner=drop"], ["inner='drop'", "keep or replay"]),
    (["+strategy=selective", "strategy.keep=''"], ["keep", "attention"]),
    (["+strategy=plan"], ["strategy.path"]),
    (["seq_len=0"], ["seq_len=0", "at least 2"]),
    (["seq_len=-5"], ["seq_len=-5"]),
    (["seq_len=128k"], ["seq_len='128k'", "Write seq_len=131072"]),
    (["seq_len=1e4"], ["Write seq_len=10000"]),
    (["seq_len=2.5"], ["seq_len=2.5", "an integer"]),
    (["seq_len=null"], ["seq_len=null", "an integer"]),
    (["seq_len=[256,512]"], ["seq_len=[256, 512]", "an integer"]),
    (["steps=0"], ["steps=0"]),
    (["steps=true"], ["steps=True", "an integer"]),
    (["batch_size=-1"], ["batch_size=-1"]),
    (["grad_accum=0"], ["grad_accum=0"]),
    (["seed=-1"], ["seed=-1"]),
    (["dtype=fp16"], ["dtype='fp16'", "fp32 or bf16 or bf16_pure"]),
    (["loss=chunk"], ["Did you mean loss=chunked?"]),
    (["tracker=off"], ["tracker", "wandb or none"]),
    (["tracker=false"], ["tracker=False", "wandb or none", "YAML"]),
    (["attn=flash3"], ["attn='flash3'", "flash_attention_3"]),
    (["tile_mlp=0"], ["tile_mlp=0"]),
    (["tile_mlp=many"], ["tile_mlp='many'", "auto"]),
    (["optim.lr=0"], ["optim.lr=0", "above 0"]),
    (["optim.lr=nan"], ["optim.lr=nan"]),
    (["optim.lr=inf"], ["optim.lr=inf", "above 0 and finite"]),
    (["optim.eps=inf"], ["optim.eps=inf", "finite"]),
    (["peft.alpha=inf"], ["peft.alpha=inf", "finite"]),
    (["sweep.job_memory_gib=inf"], ["sweep.job_memory_gib=inf", "finite"]),
    (["model.rope_scaling.type=yarn", "model.rope_scaling.factor=inf"], ["model.rope_scaling.factor=inf", "finite"]),
    (["optim.lr=fast"], ["optim.lr='fast'", "a number"]),
    (["optim.betas=0.9"], ["optim.betas=0.9"]),
    (["optim.betas=[0.9,1.0]"], ["optim.betas", "below 1"]),
    (["optim.warmup=200", "steps=100"], ["optim.warmup=200", "steps=100"]),
    (["optim=adamw"], ["optim", "a group of keys"]),
    (["data.packing=pack"], ["isolate or concat or none"]),
    (["data.eval_fraction=1"], ["data.eval_fraction", "below 1"]),
    (["data=text"], ["data.path"]),
    (["data=chat"], ["data.path"]),
    (["data=hub"], ["data.name"]),
    (["data=books"], ["data=books is unknown", "stdlib"]),
    (["model=hub"], ["model.name"]),
    (["model=llama3"], ["model=llama3 is unknown", "llama3_8b"]),
    (["model.rope_scaling.factor=4"], ["model.rope_scaling.type"]),
    (["model.name=7"], ["model.name=7", "Quote it"]),
    (["peft=qlora"], ["peft=qlora is unknown", "lora"]),
    (["peft.rank=0"], ["peft.rank=0"]),
    (["recipe=sft"], ["recipe=sft is unknown", "finetune"]),
    (["parallel.shard=0"], ["parallel.shard=0"]),
    (["parallel.shard=-1", "parallel.replicate=-1"], ["only one degree"]),
    (["parallel.sequence=-1"], ["only one degree", "parallel.sequence=-1", "parallel.shard=1"]),
    (["on_predicted_oom=stop"], ["on_predicted_oom='stop'", "warn or error"]),
    (["hardware=h1000"], ["hardware=h1000 is unknown", "Did you mean h100?"]),
    (["hardware.name=b300"], ["hardware.name='b300'", "h100"]),
    (["hardware.memory_gib=0"], ["hardware.memory_gib=0", "above 0"]),
    (["name=a/b"], ["name='a/b'", "folder name"]),
    (["name=../up"], ["folder name"]),
    (["resume=true"], ["name="]),
    (["+model._target_=os.system"], ["model._target_ is no key"]),
]


@pytest.mark.parametrize(
    ("overrides", "expected"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_a_mistake_is_one_line_that_names_the_key_and_the_fix(overrides, expected):
    from recipes.cli import USAGE_ERROR, describe, exit_code

    with pytest.raises(Exception) as caught:
        compose(overrides)
    text = describe(caught.value)
    assert "\n" not in text and "Traceback" not in text
    for part in expected:
        assert part in text
    assert exit_code(caught.value) == USAGE_ERROR


def test_an_unknown_key_in_a_file_is_an_error_too():
    with pytest.raises(ValueError, match=r"data\.packings is no key.*Did you mean data\.packing\?"):
        from_dict({"data": {"packings": "concat"}})


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        ("strategy=full", "+strategy=full"),
        ("+strategy=full", "+strategy=full"),
        ("++strategy=full", "+strategy=full"),
        ("strategy.n=3", "++strategy.n=3"),
        ("seq_len=1", "++seq_len=1"),
        ("+model=small", "model=small"),
        ("model.name=a=b", "++model.name=a=b"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("-m", "-m"),
        ("--cfg", "--cfg"),
        ("~data", "~data"),
        ("strategy=none,full", "+strategy=none,full"),
    ],
)
def test_overrides_are_rewritten_to_what_hydra_takes(written, understood):
    assert normalise([written]) == [understood]


def test_multirun_may_be_asked_for_anywhere():
    assert normalise(["a=1,2", "-m", "b=3"]) == ["-m", "++a=1,2", "++b=3"]


@pytest.mark.parametrize("flag", ["--seq_len=512", "--seq-len", "-x", "--experimental-rerun=job.pickle"])
def test_an_unknown_flag_says_how_keys_are_written(flag):
    with pytest.raises(ValueError, match="is no flag: a key is written key=value"):
        normalise([flag])
