"""Train a Hugging Face causal language model with activation checkpointing.

python train.py                                              # the embedded default, every activation kept
python train.py +strategy=selective                          # the same, keeping attention and replaying the rest
python train.py +strategy=selective model=llama3_8b seq_len=65536 batch_size=1
python train.py -m +strategy=none,full seq_len=1024,2048     # a sweep, one process a job
python train.py --cfg job                                    # every key and its value; recipes/config.py explains them
"""

from recipes.cli import main
from recipes.config import Config
from recipes.distributed import start_ranks
from recipes.programs import run_program
from recipes.rundir import open_run


def train(cfg: Config) -> None:
    """Join the ranks, open the run's directory, run the recipe in it, print how it ended."""
    with start_ranks(cfg) as ranks, open_run(cfg, ranks) as run:
        run_program(cfg, run)
    run.console.end(run.summary, run.path)


if __name__ == "__main__":
    main(train)
