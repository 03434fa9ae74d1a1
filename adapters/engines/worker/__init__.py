"""What every parallel engine shares: one rank's weights inside the engine, and the one who drives all ranks from outside.

    twin.py     the layout of a rank, learnt by its own loader on a twin of the model that holds no data
    copies.py   host copies of what the engine holds in a form that cannot be written
    rank.py     the weights of one rank: stage, commit, rollback, audit
    core.py     one rank as its driver sees it: calls and answers
    wire.py     what ranks are asked and what they answer, as JSON
    staging.py  a decoded version as files that all ranks of a host map
    landing.py  versions that a push transport writes into the ranks' memory
    ranks.py    who counts what, and the sum over all ranks
    remote.py   the driver: the engine port over any number of ranks

Owns no engine: hosts (vLLM, SGLang) say how a model is loaded and reloaded, and what a door's calls do.
"""
