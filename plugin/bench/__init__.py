"""Measurements of weight_sync by itself: sizes and speed of the codec, of the digest, and how sparse updates are.

Owns what ``weight-sync bench`` does. Owns no printing (cli/bench.py); nothing else in the package imports it.
"""
