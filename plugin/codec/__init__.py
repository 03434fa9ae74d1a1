"""Codec: diff, encode, decode, apply, fold, digest. Knows arrays and frames; knows no store and no engine."""
