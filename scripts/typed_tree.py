"""Shows the package to tools that do not know setuptools' package-dir mapping (mypy): a tree of links.

Owns nothing but the links: ``typed_tree.py DIR`` makes DIR/weight_sync/... as pyproject.toml maps it, anew each time.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(out: Path) -> None:
    """Links every mapped folder; the outermost is a real folder, since the others are linked into it."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(out, ignore_errors=True)
    for package, folder in sorted(mapping.items()):  # parents sort before their children
        if package.partition(".")[0] != "weight_sync":
            continue  # an alias of a folder that is linked as part of weight_sync
        target = out.joinpath(*package.split("."))
        if "." in package:
            target.symlink_to(ROOT / folder)
            continue
        target.mkdir(parents=True)
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
