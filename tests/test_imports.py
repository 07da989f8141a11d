"""Imports run one way: train, plan -> scripts -> recipes -> ckpt."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("ckpt", "recipes", "scripts", "hydra_plugins", "train", "plan")
MAY_IMPORT = {
    "ckpt": {"ckpt"},
    "recipes": {"recipes", "ckpt"},
    "hydra_plugins": {"hydra_plugins", "recipes"},
    "scripts": {"scripts", "recipes", "ckpt"},
    "train": {"scripts", "recipes", "ckpt"},
    "plan": {"scripts", "recipes", "ckpt"},
}
NEVER_IN_CKPT = {"hydra", "omegaconf", "wandb", "matplotlib", "rich", "datasets"}


def sources():
    files = [path for layer in ("ckpt", "recipes", "scripts", "hydra_plugins") for path in (ROOT / layer).rglob("*.py")]
    return files + [path for path in (ROOT / "train.py", ROOT / "plan.py") if path.exists()]


def imported(path):
    """Top-level names that a file imports anywhere, inside functions too. Relative imports stay in their package."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def layer_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    wrong = (imported(path) & set(LAYERS)) - MAY_IMPORT[layer_of(path)]
    assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_ckpt_names_no_program_library():
    wrong = {
        str(path.relative_to(ROOT)): sorted(imported(path) & NEVER_IN_CKPT) for path in (ROOT / "ckpt").rglob("*.py")
    }
    assert not {path: names for path, names in wrong.items() if names}


def test_library_and_recipes_import_no_test_code():
    for path in (path for path in sources() if layer_of(path) in ("ckpt", "recipes")):
        assert not imported(path) & {"tests", "zoo", "conftest", "pytest", "hypothesis"}, path


def test_the_entry_points_stay_thin():
    for name in ("train.py", "plan.py"):
        path = ROOT / name
        if path.exists():
            assert len(path.read_text().splitlines()) < 40, name


@pytest.mark.cli
def test_importing_ckpt_brings_in_no_program_library():
    code = f"import ckpt, sys; print([name for name in {sorted(NEVER_IN_CKPT)!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.cli
def test_composing_a_config_brings_in_no_training_library():
    heavy = ("torch", "transformers", "datasets", "wandb")
    code = f"import recipes.cli, sys; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.strip() == "[]"


def test_no_file_mentions_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(home|root|Users)/\w+")
    for path in sources():
        assert not pattern.search(path.read_text(encoding="utf-8")), path
