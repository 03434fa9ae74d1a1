"""vLLM as an engine.

    plugin.py     what vLLM loads in each of its processes: registers the doors
    transfer.py   first door of a worker: a weight-transfer engine (``--weight-transfer-config``)
    extension.py  second door of a worker: a worker extension (``--worker-extension-cls``)
    host.py       one vLLM worker as the core sees it
    in_place.py   keeps CPU weights unpacked, when asked to
    door.py       the control socket in vLLM's API process
    engine.py     VllmEngine: the engine port

Owns what is particular to vLLM. The rank's core, the socket with its other end, and the driver of all ranks are
adapters/engines/worker/. Nothing here imports vLLM before it runs inside vLLM, and nothing compares version numbers:
what differs between versions is looked at.
"""
