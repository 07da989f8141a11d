"""Start ranks on this machine as torchrun does, and end as the rank that failed first did.

torchrun reports a failure in forty lines of its own, below what the rank said itself, and exits with 1 whatever it
was. Here the ranks speak for themselves, and exit codes are theirs: 2 a mistake, 130 interrupted. A rank that was
killed could say nothing, so its signal is told. Takes torchrun's arguments. Serves torch 2.11 to 2.13.

    python -m recipes.launch --standalone --nproc-per-node 2 train.py +strategy=full
"""

from __future__ import annotations

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: list[str]) -> int:
    """Run the ranks; return the exit code."""
    logging.disable(logging.ERROR)  # torchrun's warnings, a line a rank that it ends
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        print(f"error: rank {rank} was ended by {failure.signal_name()}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException:  # the ranks got the signal too, and have ended
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
