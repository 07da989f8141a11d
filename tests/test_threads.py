"""OpenMP threads spin briefly, unless the user has said how they wait."""

import os

from recipes.threads import spin_briefly


def test_threads_spin_briefly_unless_the_user_said_how_they_wait(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    spin_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
