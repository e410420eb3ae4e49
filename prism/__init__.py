"""PRISM: the run time of large distributed training as a random quantity.

Everything random is a `DurationPool`; every question is a `Scenario` or a `Policy`; every answer is
a Dataset.
"""

from importlib.metadata import version as _version

import lazy_loader as _lazy

#: names are imported when they are first used: scipy.stats, numba and xarray together take more than a second
__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

__version__ = _version("prism-runtime")
