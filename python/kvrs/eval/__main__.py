"""Run ``python -m kvrs.eval``."""

from __future__ import annotations

import sys

from kvrs.cli import evaluate_command

if __name__ == "__main__":
    sys.exit(evaluate_command(sys.argv[1:]))
