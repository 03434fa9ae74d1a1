"""OpenRLHF imports flash_attn at module level, whether it is used or not; these tests use eager attention."""
