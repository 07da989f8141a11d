"""Will it fit? Predict peak, time and longest context of a training run, for any device, without one.

python plan.py model=llama3_8b seq_len=131072 batch_size=1 hardware=h200     # every strategy, as a table
python plan.py +strategy=selective model=llama3_8b hardware=h100             # one, op by op: two price tags, decision
python plan.py model=llama3_8b peft=lora hardware=rtx4090 output=json        # the table as JSON
python plan.py diff plans/A runs/B                                           # what two plans do differently

All keys of train.py count: what is planned is what the same words would train. Nothing is downloaded but, for a model
of the hub, its config. Peaks are live bytes; times are estimates.
"""

import sys

from recipes.cli import main, report
from recipes.config import Config


def plan(cfg: Config) -> None:
    """Print the table, or one strategy in full."""
    from recipes import planning_program  # torch and transformers: after the config has been found right

    planning_program.main(cfg)


def diff(paths: list[str]) -> None:
    """Print what two plans do differently."""
    from recipes import planning_program

    try:
        planning_program.diff(paths)
    except (ValueError, OSError) as error:
        sys.exit(report(error, []))


if __name__ == "__main__":
    diff(sys.argv[2:]) if sys.argv[1:2] == ["diff"] else main(plan)
