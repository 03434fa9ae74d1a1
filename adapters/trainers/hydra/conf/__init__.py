"""The config groups, as YAML files beside this one. Owns no code."""
