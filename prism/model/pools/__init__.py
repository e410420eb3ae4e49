"""Duration pools: distributions of the time that one operation takes, and how they are fitted."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
