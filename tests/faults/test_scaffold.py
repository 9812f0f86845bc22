"""The sink that `penstock new` writes goes through the whole crash suite; its other tests run with the command line's."""

from __future__ import annotations

import subprocess
import sys


def test_the_sink_that_is_written_for_strangers_survives_every_kill(tmp_path):
    for command in ("penstock new sink acme_crm", "pytest -q -p no:cacheprovider -k Crashes test_acme_crm.py"):
        result = subprocess.run(
            [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
