"""Transports: how a version travels. Each folder owns one; the core knows them only through ``weight_sync.ports``."""
