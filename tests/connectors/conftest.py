"""What the tests of several connectors share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.cli import main


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`cli("check", file)`: the exit code, and what was printed to either stream."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return int(exit.value.code or 0), out, err

    return run
