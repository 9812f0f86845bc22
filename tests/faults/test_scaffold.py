"""The sink that `penstock new` writes goes through the whole crash suite; its other tests run with the command line's."""

from __future__ import annotations

import subprocess
import sys

from thorough import THOROUGH


def test_the_sink_that_is_written_for_strangers_survives_every_kill(tmp_path):
    chosen = "Crashes" if THOROUGH else "Crashes and (commit or fenced)"  # the design is that of the memory sink
    for command in (["penstock", "new", "sink", "acme_crm"], ["pytest", "-q", "-k", chosen, "test_acme_crm.py"]):
        result = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
