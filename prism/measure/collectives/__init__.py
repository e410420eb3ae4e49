"""Measured collectives and transfers: reading what others and `prism bench collective` wrote, latency by size."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
