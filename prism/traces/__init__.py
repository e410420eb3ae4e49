"""Measured steps in, step models out.

`read_trace` makes one Dataset of op records, `build_graph` finds what waits for what, `observe`
separates durations from waiting, `replay` checks the two against the measured step times, and
`model_from_trace` puts pools and their coupling on the graph.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
