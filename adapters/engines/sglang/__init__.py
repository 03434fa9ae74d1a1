"""SGLang as an engine.

    plugin.py     what SGLang loads in its processes: opens the doors, remembers parameters before they are packed
    door.py       the control socket in the server's own process
    rank_door.py  the socket of one rank, in its scheduler's process
    host.py       one scheduler as the core sees it
    reload.py     loads modules anew that compute with something else than their parameters
    engine.py     SglangEngine: the engine port

Owns what is particular to SGLang. The rank's core, the socket with its other end, and the driver of all ranks are
adapters/engines/worker/. Nothing here imports SGLang before it runs inside SGLang.
"""
