"""Names that OpenRLHF imports."""

from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def _missing(*_: object, **__: object) -> None:
    raise RuntimeError("flash_attn is not installed")


index_first_axis = pad_input = unpad_input = _missing
