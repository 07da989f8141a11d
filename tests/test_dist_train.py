"""Whole runs over several ranks beside one process: the same rows, losses, gradient norms and held-out losses."""

import random

import dist_train
import pytest
from dist_kit import run_ranks
from test_dist_job import free_port

pytestmark = pytest.mark.dist
CELLS = [
    ("llama", {"tie_word_embeddings": "true"}, ["grad_accum=2", "tile_mlp=2", "+strategy=selective"], 2),
    (
        "gemma2",
        {"sliding_window": 8, "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
        ["+strategy=full"],
        1,
    ),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    letters = random.Random(0)
    for number in range(32):
        length = dist_train.LENGTHS[number % len(dist_train.LENGTHS)]
        text = "".join(letters.choice("abcdefg hi\n") for _ in range(length))
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize("kind, fields, words, num_meshes", CELLS, ids=[cell[0] for cell in CELLS])
def test_a_run_does_not_depend_on_the_mesh(folder, kind, fields, words, num_meshes):
    words = [*dist_train.words(str(folder), kind, **fields), *words]

    def run(name, num_ranks, rows, *mesh):
        overrides = [*words, f"name={name}", f"batch_size={rows}", *mesh]
        return run_ranks(dist_train.train, num_ranks, free_port(), overrides, timeout=300, group=False)

    expected = run("one", 1, 2)
    meshes = {"sequence": (2, "parallel.sequence=2"), "shard": (1, "parallel.shard=2")}
    for mesh in list(meshes)[:num_meshes]:
        rows, word = meshes[mesh]
        found = run(mesh, 2, rows, word)
        for (loss, norm, held_out), (want, want_norm, want_held_out) in zip(found, expected, strict=True):
            assert loss == pytest.approx(want, abs=2e-6), mesh
            assert norm == pytest.approx(want_norm, rel=1e-5), mesh
            assert held_out is None or held_out == pytest.approx(want_held_out, abs=2e-6), mesh
