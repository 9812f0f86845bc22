"""Moves epochs: routing, the journal, the epoch loop, supervision and telemetry."""
