"""Adapters: trainers (where a host hooks in) and engines (how a version gets into a model)."""
