"""The start of an engine, which takes seconds, beside that of the connectors."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.runtime.job import Engine
from penstock.runtime.telemetry import Telemetry


class Starting:
    """Starts the engine in a thread while the connectors open."""

    def __init__(self, engine: Engine, lock: Path, telemetry: Telemetry) -> None:
        self._engine = engine
        self._lock = lock
        self._telemetry = telemetry
        self._error: BaseException | None = None
        self._abandoned = self._started = False
        self._done = threading.Lock()
        self._thread = threading.Thread(target=self._start, name="penstock-engine", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self._telemetry.engine("starting Spark")
            with self._telemetry.waits.until("Spark to start"):
                self._engine.start()
                self._engine.hold(self._lock)
            self._telemetry.engine(self._engine.version)
        except BaseException as error:  # noqa: BLE001 (raised again where the engine is needed)
            self._error = error
        with self._done:
            self._started = True
            abandoned = self._abandoned
        if abandoned:
            self._engine.stop()

    def wait(self, stop: threading.Event) -> bool:
        """True once the engine runs; False when it is no longer wanted."""
        while self._thread.is_alive():
            self._thread.join(0.05)
            if stop.is_set():
                return False
        if self._error is not None and stop.is_set():  # it may have had the same signal
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Stop the engine; one that is still starting stops itself, since nobody should wait for it to say why it failed."""
        with self._done:
            self._abandoned = True
            started = self._started
        if started:
            self._engine.stop()
