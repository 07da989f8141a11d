"""Run a recorded run again and say whether it comes out the same: losses step by step, and the memory peak.

    python scripts/reproduce.py runs/NAME
    python scripts/reproduce.py results/reference/small_selective        # recorded on a CPU; from the checkout's root

First the machine, the versions, the data and the attention kernel are compared, and what differs is listed. On the same
stack losses must then be equal bit by bit; on another one within the tolerance that is printed. Peaks: within 1%.
Exit code: 0 reproduced, 1 not, 2 a folder that holds no whole run. The new run stands in runs/reproduce-NAME-TIME/.
"""

from __future__ import annotations

import argparse
import sys

from recipes.allocator import keep_freed_memory
from recipes.cli import report
from recipes.reproduce import reproduce
from recipes.threads import spin_briefly


def main() -> int:
    """Print what differs and the verdict; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder of a run, or a recorded one under results/")
    parser.add_argument("--runs-dir", default="runs", help="where the new run goes (default: %(default)s)")
    arguments = parser.parse_args()
    spin_briefly()
    keep_freed_memory()
    try:
        verdict = reproduce(arguments.path, arguments.runs_dir)
    except (Exception, KeyboardInterrupt) as error:
        return report(error, sys.argv[1:])
    print(verdict.text)
    return 0 if verdict.reproduced else 1


if __name__ == "__main__":
    sys.exit(main())
