"""What-ifs: scenarios applied to a step model, and the studies that are made of them."""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
