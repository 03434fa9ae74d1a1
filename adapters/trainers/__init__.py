"""Trainer adapters: implementations of ``weight_sync.ports.TrainerAdapter``, one per host framework."""
