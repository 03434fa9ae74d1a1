"""Stand-in for OpenRLHF's own loggers, which write to standard output."""

from __future__ import annotations

import logging
import sys


def init_logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.propagate = False
    return logger
