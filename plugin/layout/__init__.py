"""Layout: storage <-> checkpoint coordinates. box.py is the geometry that all other rooms use."""
