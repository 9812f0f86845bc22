"""Metrics, health, status and the console over HTTP: of one run, or of all pipelines of a machine."""

from __future__ import annotations

from pathlib import Path

from penstock.config import Secret
from penstock.pipeline import Pipeline
from penstock.runtime.telemetry import Telemetry
from penstock.web.server import Access, Server
from penstock.web.watched import Fleet, Watched

__all__ = ["Server", "serve", "serve_all"]


def serve(telemetry: Telemetry, port: int, pipeline: Pipeline | None = None) -> Server:
    """Serve one run: the console, `/metrics`, `/healthz`, `/readyz` and `/api/status`; port 0 takes a free one."""
    processing = pipeline.processing if pipeline is not None else None
    access = Access.of(
        processing.metrics_host if processing else "127.0.0.1", processing.console_token if processing else None
    )
    state_dir = processing.state_dir if processing is not None else None
    server = Server(access, port, Fleet.of_run(Watched.of_run(telemetry, state_dir, pipeline)), telemetry)
    telemetry.url = server.url
    return server


def serve_all(directories: list[Path], host: str, port: int, token: Secret | None) -> Server:
    """Serve the console of every pipeline whose state directory is in or under one of these directories."""
    return Server(Access.of(host, token), port, Fleet(directories))
