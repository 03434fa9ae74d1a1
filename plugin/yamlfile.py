"""YAML files of people, read strictly: a key that is given twice is an error, not the last value.

Owns the reading. Owns no meaning of the keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from weight_sync.errors import ConfigError

__all__ = ["read_yaml"]


class _Strict(yaml.SafeLoader):
    """Safe, and without keys that hide each other."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ; merged ones (``<<``) may be overridden, as YAML has it."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, str | int | float | bool) and key in seen:
                raise ConfigError("a key is given twice", field=str(key), found=f"again in line {line}",
                                  expected="once", do="keep one of them")  # fmt: skip
            if isinstance(key, str | int | float | bool):
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """What a YAML or JSON file holds. Raises ConfigError when it cannot be read, is not YAML, or has a key twice."""
    try:
        return _Strict(Path(path).read_text()).get_single_data()
    except OSError as error:
        raise ConfigError("cannot read the file", field=str(path), found=error.strerror) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("neither YAML nor JSON", field=str(path), found=str(error)) from error
