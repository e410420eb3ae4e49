"""Fleets of devices: reading measurements, and how much devices differ from each other and in time.

Spatial variability is between devices, temporal variability over the runs of one device.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
