"""What only a GPU can prove, in one command of under four minutes on one H200; a table last, and JSON.

    python scripts/gpu_check.py                        # all sections
    python scripts/gpu_check.py --only exact,peaks     # some
    python scripts/gpu_check.py --toy                  # all its code, on a CPU, in a minute: proves nothing of a GPU

Sections, the most important first: exact (bf16, flash attention), peaks (predicted against max_memory_allocated at 8K,
32K and 128K tokens), budgets (auto within five budgets), offload (time and stalls), pool (nothing grows), speed
(tokens/s and MFU beside the library at the same memory), packed (documents in one row), context (the longest in
24 GiB). A section that fails is recorded and the others run. Exit code 1 if something asked for was not got.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "scripts")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read when CUDA is first used
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402

from recipes.rundir import write_atomically  # noqa: E402
from scripts import bench_store, gpu_check_memory, gpu_check_speed  # noqa: E402
from scripts.gpu_check_scale import H200, TOY  # noqa: E402
from scripts.gpu_check_setup import Check, OutOfTime  # noqa: E402

SECTIONS = {
    function.__name__: function
    for function in (
        gpu_check_memory.exact,
        gpu_check_memory.peaks,
        gpu_check_memory.budgets,
        gpu_check_speed.offload,
        gpu_check_memory.pool,
        gpu_check_speed.speed,
        gpu_check_memory.packed,
        gpu_check_speed.context,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections and print the table; return 1 if something asked for was not got."""
    options = parse(argv)
    if not options.toy and not torch.cuda.is_available():
        print("no CUDA device: give --toy to run this code on the CPU", file=sys.stderr)
        return 2
    if not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"):
        print(f"transformers {transformers.__version__} is too old: 5.23 or newer is needed", file=sys.stderr)
        return 2
    check = Check(TOY if options.toy else H200, options.seconds)
    took = {}
    if check.is_cuda:
        note_device(check, torch.cuda.get_device_name())
    try:
        check.ask_ahead(options.only)
        for name in options.only:
            start, check.section = time.perf_counter(), name
            run_section(check, name)
            took[name] = round(time.perf_counter() - start, 1)
            report = {**circumstances(check), "sections": options.only, "seconds": took, "rows": check.rows}
            # After each: what ends the process takes no finding with it.
            write_atomically(options.json, json.dumps(report, indent=1, default=str) + "\n")
    finally:
        check.close()
    print(table(report))
    print(f"wrote {options.json}")
    return 0 if all(row["ok"] is not False for row in check.rows) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=225.0, help="begin nothing after so many")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"--only {','.join(unknown)} is unknown; there are {', '.join(SECTIONS)}")
    if options.json is None:
        options.json = ROOT / "results" / f"gpu_check_{'toy' if options.toy else 'h200'}.json"
    try:  # before anything is measured
        options.json.parent.mkdir(parents=True, exist_ok=True)
        if options.json.is_dir() or not os.access(options.json.parent, os.W_OK):
            raise OSError("no file may be written there")
    except OSError as error:
        parser.error(f"--json {options.json}: {error}")
    return options


def note_device(check: Check, name: str) -> None:
    """Record whether this is the device that sizes and predictions are for."""
    check.section = "device"
    asked = str(check.scale.hardware)
    check.note("sizes and predictions are for it", asked, name, asked in name.lower())


def run_section(check: Check, name: str) -> None:
    """Run one section; record a failure instead of ending the check."""
    try:
        SECTIONS[name](check)
    except OutOfTime as error:
        check.note("not finished", "-", str(error), None)
    except Exception as error:  # whatever a device may raise, out of memory included
        traceback.print_exc()
        check.note("failed", "-", bench_store.first_line(error)[:200], False)
    finally:
        check.free()


def circumstances(check: Check) -> dict[str, Any]:
    """What was measured where, and with what."""
    device = torch.cuda.get_device_name() if check.is_cuda else f"CPU ({platform.machine()})"
    return {
        "device": device,
        "scale": check.scale.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def table(report: dict[str, Any]) -> str:
    """Write the findings as a short table."""
    lines = [
        f"{report['device']}, torch {report['torch']}, transformers {report['transformers']}, {report['date']}",
        "",
        "| section | what | asked | got | |",
        "|---|---|---|---|---|",
    ]
    marks = {True: "ok", False: "NOT OK", None: ""}
    for row in report["rows"]:
        lines.append(f"| {row['section']} | {row['what']} | {row['asked']} | {row['got']} | {marks[row['ok']]} |")
    missed = sum(row["ok"] is False for row in report["rows"])
    asked = sum(row["ok"] is not None for row in report["rows"])
    return "\n".join([*lines, "", f"{asked - missed} of {asked} asked for were got; {report['seconds']} s"])


if __name__ == "__main__":
    sys.exit(main())
