"""Names that OpenRLHF imports."""


def all_gather(*_: object, **__: object) -> None:
    raise RuntimeError("flash_attn is not installed")
