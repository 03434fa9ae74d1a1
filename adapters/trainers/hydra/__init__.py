"""The config groups ``+weight_sync=grpc|file|rdma`` of hosts that are configured by Hydra (verl).

Installed as ``hydra_plugins.weight_sync``, where Hydra looks for plugins. Owns the search path, the groups (conf/) and
the check that runs before the host does (check.py). Owns no key (weight_sync.config).
"""
