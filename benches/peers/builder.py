"""What all peers share: how a form is built, and why it cannot be."""

from __future__ import annotations

from collections.abc import Callable

from benches.inputs import Case
from benches.timing import Form

Builder = Callable[[Case], Form]
"""Makes the form of a peer for a case; raises `MissingPeerError` if there is none on this machine."""


class MissingPeerError(Exception):
    """A peer is not installed or refuses the case; the message goes into the table."""
