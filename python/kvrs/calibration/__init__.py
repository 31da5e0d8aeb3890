"""Calibration: what data-driven codecs need to know of a model, measured on some texts.

`calibrate` reads texts with the model, sums means and second moments (`statistics`), turns them into
transforms (`transform`), measures how much each layer matters (`sensitivity`), divides the bits (`allocate`,
`widths`), and returns a plan with all of it. Finished parts can be kept in a file (`checkpoint`).
"""

from __future__ import annotations

from kvrs.calibration.fingerprint import check, fingerprint
from kvrs.calibration.run import calibrate

__all__ = ["calibrate", "check", "fingerprint"]
