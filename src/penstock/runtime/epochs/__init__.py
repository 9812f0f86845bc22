"""
The epoch protocol: bind a number to its ranges, stage, prepare, commit, acknowledge; and go on from any crash.

The manifest is the only authority. `docs/spec/epochs.md` has the crash matrix.
"""

from penstock.runtime.epochs.contexts import Contexts
from penstock.runtime.epochs.loop import EpochLoop, EpochReport
from penstock.runtime.epochs.manifest import Identity, Manifest, Range
from penstock.runtime.epochs.state import State, forget, reset, restage
from penstock.runtime.epochs.wiring import Wiring, followed

__all__ = [
    "Contexts",
    "EpochLoop",
    "EpochReport",
    "Identity",
    "Manifest",
    "Range",
    "State",
    "Wiring",
    "followed",
    "forget",
    "reset",
    "restage",
]
