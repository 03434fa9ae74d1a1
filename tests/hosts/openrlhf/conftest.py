"""Makes the real servers of tests/engines importable, for sites that have one. Owns no fixture."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "engines"))
