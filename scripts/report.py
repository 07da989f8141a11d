"""Draw a sweep: one HTML page that needs no network, and its figures as PNGs.

    python scripts/report.py runs/SWEEP          # writes runs/SWEEP/report.html and runs/SWEEP/report/*.png

The folder is a sweep's (train.py -m), or any that holds several runs. Exit code 2 where it is neither.
"""

from __future__ import annotations

import argparse
import sys

from recipes.cli import report
from recipes.report import write_report


def main() -> int:
    """Write the report and say where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder of a sweep, or of several runs")
    try:
        out = write_report(parser.parse_args().path)
    except (Exception, KeyboardInterrupt) as error:
        return report(error, sys.argv[1:])
    print(f"report: {out}, figures: {out.with_suffix('')}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
