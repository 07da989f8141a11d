"""Let OpenMP's threads wait politely: by default they spin for milliseconds at each barrier.

On a busy machine that keeps the very thread they wait for off its core. Measured (4 layers, hidden 256, 2 x 1,024
tokens, two threads on two cores at a load of 10, torch 2.13): 8 to 19 s a step by default, 1.4 to 3.3 s with this.

    spin_briefly()           # before torch is imported: libgomp reads it when it is loaded
"""

from __future__ import annotations

import os


def spin_briefly() -> None:
    """Let threads sleep after a thousand turns, some microseconds, unless the user has set how they wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "1000"
