"""Engines: implementations of ``weight_sync.ports.Engine``."""
